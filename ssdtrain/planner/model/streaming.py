"""Model state that passes through the device in the cost model, block by block, as `ssdtrain.state` does it.

A load is read into host memory (from drives; in host memory it is there), then copied over the link that activations use too. The
copy begins when one of the buffers on the device is free: that of the block used longest ago, from the end of its use and of the
copy of its gradients. Reads and writes of drives pass through two buffers of host memory each.
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
        self._link, self._buffers = machine.link, machine.state_buffers
        self._server: Server | None = None  # the drives; None: host memory
        if machine.state is not None:
            self._server = running.servers.setdefault(machine.state.name, Server(machine.state))
        self._present: dict[ChunkKey, float] = {}  # until when each is used, the one used longest ago first
        self._copied: deque[float] = deque([0.0] * STAGED, STAGED)
        self._written: deque[Job] = deque()

    def load(self, key: ChunkKey, nbytes: int, present: int, times: BlockTimes) -> None:
        """The block needs `nbytes` now. Loads are issued ahead, in order, as far as there is room.

        Args:
            present: bytes of these that need not come if the block's state is still there.
        """
        if not nbytes:
            return
        assert self._link is not None
        running, room = self._running, 0.0
        if key in self._present:
            nbytes, room = nbytes - present, self._present.pop(key)
        elif len(self._present) >= self._buffers:
            room = self._present.pop(next(iter(self._present)))
        self._present[key] = room
        if not nbytes:
            return
        read = 0.0 if self._server is None else self._server.begin_read(nbytes, self._copied[0])
        ended = max(read, room, running.load_link_free) + nbytes / self._link.to_device
        running.load_link_free = ended
        self._copied.append(ended)
        times.load_stall += max(0.0, ended - running.now)
        running.now = max(running.now, ended)

    def used(self, key: ChunkKey, gradients: int = 0) -> None:
        """The block's forward or backward has ended; so many bytes of its gradients leave."""
        if key not in self._present:
            return
        running = self._running
        left = running.now
        if gradients:
            assert self._link is not None
            if self._server is not None and len(self._written) >= STAGED:
                left = max(left, self._server.finish(self._written.popleft()))
            left = max(left, running.store_link_free) + gradients / self._link.to_host
            running.store_link_free = left
            if self._server is not None:
                job = Job(gradients, left)
                self._server.enqueue(job)
                self._server.written += gradients
                self._written.append(job)
        self._present[key] = left
