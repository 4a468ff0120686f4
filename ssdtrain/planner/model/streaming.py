"""Model state that passes through the device in the cost model, block by block, as `ssdtrain.state` does it.

A load is read into host memory (from drives; in host memory it is there), then copied over the link that activations use too. The
copy begins when one of the buffers on the device is free: that of the block used longest ago, from the end of its use and of the
copy of its gradients. Reads and writes of drives pass through two buffers of host memory each.

Without a link (CPU) what is read is there. A load is issued when the block before begins.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ssdtrain.planner.model.queues import Job, Server
from ssdtrain.planner.model.types import BlockTimes

if TYPE_CHECKING:
    from ssdtrain.planner.model.simulation import Simulation

__all__ = ["StateStreaming"]

STAGED = 2
"""Blocks in host memory on their way from drives, and on their way to them."""

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

    def used(self, key: ChunkKey, gradients: int = 0) -> None:
        """The block's forward or backward has ended; so many bytes of its gradients leave."""
        if key not in self._present:
            return
        running = self._running
        left = running.now
        if gradients:
            if self._server is not None and len(self._written) >= STAGED:
                running.flush()  # what is deferred stands in line before it
                left = max(left, self._server.finish(self._written.popleft()))
            if self._link is not None:
                left = max(left, running.store_link_free) + gradients / self._link.to_host
                running.store_link_free = left
            if self._server is not None:
                job = Job(gradients, left)
                self._server.enqueue(job)
                self._server.written += gradients
                self._written.append(job)
        self._present[key] = left, self._present[key][1]
