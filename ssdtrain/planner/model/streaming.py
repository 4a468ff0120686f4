"""Model state that passes through the device in the cost model, block by block, as `ssdtrain.state` does it.

A load is read into host memory (from drives; in host memory it is there), then copied over the link that activations use too. The
copy begins when one of the buffers on the device is free: that of the block used longest ago, from the end of its use and of the
copy of its gradients. Reads and writes of drives pass through two buffers of host memory each.

Without a link (CPU) what is read is there. A load is issued when the block before begins.

Note: [Steps on CPUs]
One thread steps the blocks whose gradients are there, one after the other, as `ssdtrain.state.host_steps` does: from the last
backward on, or when all passes are over, in the order of forward. What stays on a device comes back behind its step. With a link
two blocks are with the thread at most, else backward waits; without one a block's memory is free when it is stepped. The next
forward waits for the blocks that are late. Once it has waited, all that follows comes later by as much: so the longest of these
waits is what a step takes longer. What is in no block is stepped between, when the thread is not.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from ssdtrain.planner.model.queues import Job, Server
from ssdtrain.planner.model.types import Block, BlockTimes

if TYPE_CHECKING:
    from ssdtrain.planner.model.simulation import Simulation

__all__ = ["HostSteps", "StateStreaming"]

STAGED = 2
"""Blocks in host memory on their way from drives, and on their way to them."""

WITH_THREAD = 2
"""Blocks of a device that the thread which steps has at a time."""

ChunkKey = tuple[int, int]
"""Chunk of the model, and block in it."""


class StateStreaming:
    """Which blocks' state is on the device, and since when it may leave."""

    def __init__(self, running: Simulation) -> None:
        self._running, machine = running, running.machine
        self._link, self._work = machine.link, machine.state_work
        self._by_bytes = machine.state_room is not None
        self._room = machine.state_buffers if machine.state_room is None else machine.state_room
        self._server: Server | None = None  # the drives; None: host memory
        if machine.state is not None:
            self._server = running.servers.setdefault(machine.state.name, Server(machine.state))
        # Until when each is used, and what it takes of the room; the one used longest ago first.
        self._present: dict[ChunkKey, tuple[float, int]] = {}
        self._taken = 0  # by all of them
        self._weights: dict[ChunkKey, int] = {}  # bytes that each loads for its forward
        self._copied: deque[float] = deque([0.0] * STAGED, STAGED)
        self._written: deque[Job] = deque()
        self._issued = 0.0  # when the next load is, without a link

    def load(self, key: ChunkKey, nbytes: int, times: BlockTimes, *, backward: bool = False) -> None:
        """The block needs `nbytes` now. Loads are issued ahead, in order, as far as there is room.

        Args:
            backward: what came for its forward need not come if it is still there.
        """
        running, room, present = self._running, 0.0, self._present
        if not backward:
            self._weights[key] = nbytes
        if key in present:
            room, taken = present.pop(key)
            nbytes -= self._weights.get(key, 0) if backward else 0
        else:
            taken = nbytes if self._by_bytes else 1
            while present and self._taken + taken > self._room:  # those used longest ago go first
                used, freed = present.pop(next(iter(present)))
                self._taken -= freed
                if used > room:
                    room = used
            self._taken += taken
        present[key] = room, taken
        if nbytes > 0:
            ended = self._come(nbytes, room)
            if ended > running.now:
                times.load_stall += ended - running.now
                running.now = ended
        self._issued = running.now
        if nbytes > 0 and self._work:
            running.run(nbytes * self._work)

    def _come(self, nbytes: int, room: float) -> float:
        """Return when `nbytes` are there, for which there is room from `room` on."""
        running, server = self._running, self._server
        if self._link is None:
            issued = max(self._issued, room)
            return issued if server is None else server.begin_read(nbytes, issued)
        read = 0.0 if server is None else server.begin_read(nbytes, self._copied[0])
        free = running.load_link_free if running.load_link_free > room else room
        ended = (free if free > read else read) + nbytes / self._link.to_device
        running.load_link_free = ended
        self._copied.append(ended)
        return ended

    def used(self, key: ChunkKey, gradients: int = 0, *, last: bool = False) -> float:
        """The block's forward or backward has ended; so many bytes of its gradients leave. Returns when they have left.

        Args:
            last: no other backward of this step follows.
        """
        running = self._running
        left = running.now
        if gradients:
            server = None if last and running.machine.steps_inside else self._server  # a step uses them up
            if server is not None and len(self._written) >= STAGED:
                running.flush()  # what is deferred stands in line before it
                left = max(left, server.finish(self._written.popleft()))
            if self._link is not None:
                left = max(left, running.store_link_free) + gradients / self._link.to_host
                running.store_link_free = left
            if server is not None:
                job = Job(gradients, left)
                server.enqueue(job)
                server.written += gradients
                self._written.append(job)
        if key in self._present:
            self._present[key] = left, self._present[key][1]
        return left

    def stepped(self, key: ChunkKey, when: float) -> None:
        """A block's memory, which its step has used too, is free from then on."""
        if key in self._present:
            self._present[key] = when, self._present[key][1]


class HostSteps:
    """See Note: [Steps on CPUs]."""

    def __init__(self, running: Simulation) -> None:
        self._running, self._link = running, running.machine.link
        self._free = 0.0  # the thread, from then on
        self._with_thread: deque[tuple[float, ChunkKey, int]] = (
            deque()
        )  # until when, and what comes back then
        self._begun: dict[
            ChunkKey, float
        ] = {}  # when the forward of each began, and what comes before it then
        self._loads: dict[ChunkKey, int] = {}
        self._ready: dict[ChunkKey, float] = {}
        self._behind: list[
            tuple[ChunkKey, Block]
        ] = []  # what is stepped when all passes are over, the last first

    def forward(self, key: ChunkKey, block: Block) -> None:
        """The forward of a block begins."""
        if key not in self._begun:
            self._begun[key], self._loads[key] = self._running.now, block.forward_loads

    def backward(self, key: ChunkKey, block: Block, left: float, *, last: bool) -> None:
        """The backward of a block has ended, and its gradients have `left`. `last`: no other of this step follows."""
        running = self._running
        self.collect()
        if not last:
            return
        if not running.machine.steps_inside:
            self._behind.append((key, block))
            return
        if self._link is not None and len(self._with_thread) >= WITH_THREAD:
            running.now = max(running.now, self._with_thread[0][0])
            self.collect()
        self._step(key, block, left)
        if self._link is None:
            running.streaming.stepped(key, self._free)

    def _step(self, key: ChunkKey, block: Block, since: float) -> None:
        self._free = max(self._free, since) + block.cpu_step
        self._with_thread.append((self._free, key, block.returns))

    def collect(self, until: float | None = None) -> None:
        """Let what has been stepped come back."""
        running = self._running
        now = running.now if until is None else until
        while self._with_thread and self._with_thread[0][0] <= now:
            ready, key, nbytes = self._with_thread.popleft()
            if self._link is not None and nbytes:
                ready = max(ready, running.load_link_free) + nbytes / self._link.to_device
                running.load_link_free = ready
            self._ready[key] = ready

    def next_step(self) -> None:
        """What is counted from now on is the next step's."""
        for known in (self._begun, self._ready, self._behind):
            known.clear()

    def wait(self) -> float:
        """Return the seconds that the next forward, which follows the last pass, waits in all."""
        running = self._running
        for key, block in reversed(self._behind):
            self._step(key, block, running.now)
        self.collect(inf)
        late = 0.0
        for key, ready in self._ready.items():
            if self._link is not None:
                ready += self._loads[key] / self._link.to_device
            late = max(late, ready - running.now - (self._begun[key] - running.began))
        return late
