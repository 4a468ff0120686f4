"""Device memory that loads are copied into, reused in the order of the streams, without the host or the compute stream waiting.

Note: [Load targets]
A restored tensor is written by the load stream and read by the stream that runs backward. If its memory came from the compute
stream's allocations, the copy would have to wait for all work that is queued there, and never overlap with it. So targets have
memory of the load stream, and that of one which has died is used again for the next, although work that reads it may still be
queued elsewhere: when a target dies, an event is recorded on each stream that used it, and the copy into the next one waits, on
the load stream, for these events.

Targets are reserved a few regions before they are filled. So several are alive at a time, and the next one takes the memory of
the one that died first: its copy waits for work that is long over.

Note: [Memory of the allocator]
The allocator knows only the load stream. What it is given back while another stream reads it, it may unmap at any time (with
expandable segments, where memory is short or after `torch.cuda.empty_cache`) or hand to others (cudaMallocAsync, or a component
that was given the same stream of torch's pool). So what is handed out is an alias with a storage of its own; the block behind it
stays here until the death of the alias has been noticed, and the events of its users have passed.
"""

from __future__ import annotations

import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ssdtrain.device import Device, Event
from ssdtrain.offload.tensors.geometry import ALIGNED

__all__ = ["LoadTargets", "Target"]

SLACK = 2
"""A block is used again for a target that needs at least this part of it."""


class Target(weakref.ref[torch.UntypedStorage]):
    """Memory that a load fills; a reference to the storage of the alias that is handed out."""

    __slots__ = ("awaited", "block", "streams", "tensor")

    block: torch.Tensor
    """What the allocator gave (uint8)."""
    tensor: torch.Tensor | None
    """The alias (uint8), until `take`."""
    awaited: list[Event]
    """What a copy into it waits for first; when it is dead, what the copy into the next one waits for."""
    streams: list[Any]
    """Streams that were handed it."""


class LoadTargets:
    """Allocates targets, each with what a copy into it has to wait for. Called with the engine's lock held.

    Args:
        device: allocates on its load stream, and records events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._dead: SimpleQueue[Target] = SimpleQueue()
        self._alive: dict[int, Target] = {}
        # Dead, in the order of their deaths: not out of use yet, or kept for the next loads. See `_trim`.
        self._pending: deque[Target] = deque()
        self._alive_bytes = self._pending_bytes = 0  # of their blocks
        self._peak_bytes = 0  # the most of `_alive_bytes` since none was alive
        self._latest = 0  # bytes of the latest target

    def reserve(self, nbytes: int, lead: int = 0) -> Target:
        """Return a target of `nbytes` uninitialised bytes, whose address is `lead` modulo `ALIGNED`.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
        """
        if not self._dead.empty():
            self.note_deaths()
        self._latest = nbytes + ALIGNED if lead else nbytes
        block, awaited = self._block(self._latest)
        self._alive_bytes += block.numel()
        self._peak_bytes = max(self._peak_bytes, self._alive_bytes)
        start = (lead - block.data_ptr()) % ALIGNED if lead else 0
        part = block if block.numel() == nbytes else block[start : start + nbytes]
        tensor = from_dlpack(to_dlpack(part))
        target = Target(tensor.untyped_storage(), self._dead.put)
        target.block = block
        target.tensor = tensor
        target.awaited = awaited
        target.streams = []
        self._alive[id(target)] = target
        return target

    def _block(self, nbytes: int) -> tuple[torch.Tensor, list[Event]]:
        """Memory, and the events that end its use so far."""
        for target in self._pending:
            if nbytes <= target.block.numel() <= SLACK * nbytes:
                self._pending.remove(target)
                self._pending_bytes -= target.block.numel()
                return target.block, target.awaited
        self._trim(self._peak_bytes - self._alive_bytes - nbytes)
        try:
            return self._device.load_target(nbytes), []
        except torch.OutOfMemoryError:
            self._trim(-1)
            return self._device.load_target(nbytes), []

    def take(self, target: Target) -> torch.Tensor:
        """Return the tensor, which from now on is alive only while others hold it."""
        tensor, target.tensor = target.tensor, None
        assert tensor is not None
        return tensor

    def hand_out(self, target: Target) -> None:
        """The current stream reads the target from now on."""
        stream = self._device.current_stream()
        if stream not in target.streams:
            target.streams.append(stream)

    def note_deaths(self) -> None:
        """Record where the streams are that used what has died since, and give back what is out of use. Cheap when nothing is."""
        dead = self._dead
        while not dead.empty():
            try:
                self._retire(dead.get_nowait())
            except Empty:
                break
        if self._pending:
            self._trim(self._peak_bytes - self._alive_bytes if self._alive else 0)

    def _trim(self, limit: int) -> None:
        """Give back what is out of use, but for `limit` bytes of the size that is needed now: as much as was alive at once stays
        while loads go on, since to allocate takes longer than the rest of a load."""
        pending = self._pending
        while pending:
            nbytes = pending[0].block.numel()
            if (self._pending_bytes <= limit and nbytes <= SLACK * self._latest) or not _passed(
                pending[0].awaited
            ):
                break
            pending.popleft()
            self._pending_bytes -= nbytes
        if not self._alive:
            self._peak_bytes = 0

    def _retire(self, target: Target) -> None:
        del self._alive[id(target)]
        # What it had to wait for itself, if nothing was ever copied into it, the next copy into its memory waits for.
        awaited = target.awaited
        _passed(awaited)
        for stream in target.streams:
            event = self._device.record(stream)
            if event is not None:
                awaited.append(event)
        self._alive_bytes -= target.block.numel()
        self._pending_bytes += target.block.numel()
        self._pending.append(target)


def _passed(events: list[Event]) -> bool:
    """Forgets those that have passed."""
    while events:
        if not events[0].query():
            return False
        del events[0]
    return True
