"""Device memory that loads are copied into, reused in the order of the streams, without the host or the compute stream waiting.

Note: [Load targets]
A restored tensor is written by the load stream and read by the stream that runs backward. If its memory came from the compute
stream's allocations, the copy would have to wait for all work that is queued there, and never overlap with it. So targets are
allocated on the load stream, whose allocator hands a block out again as soon as the host releases it, although work that reads
it may still be queued elsewhere. What is missing is that order: when a target dies, an event is recorded on the stream that used
it, and a copy into memory that overlaps it waits, on the load stream, for that event.

Targets are reserved a few regions before they are filled. So several are alive at a time, and the next one takes the memory of
one that was used a few regions ago, not of the last: its copy waits for work that is long over.

The death of a storage is noticed through a weak reference and a queue, perhaps later than the allocator notices it. A new target
that overlaps one that is not known to be dead proves that it is: its event is recorded then.
"""

from __future__ import annotations

import weakref
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ssdtrain.device import Device, Event

__all__ = ["LoadTargets", "Target"]


class Target(weakref.ref[torch.UntypedStorage]):
    """Memory [start, end) that a load fills."""

    __slots__ = ("awaited", "end", "events", "start", "streams", "tensor")

    start: int
    end: int
    tensor: torch.Tensor | None
    """Its bytes (uint8), until `take`."""
    awaited: list[Event]
    """What a copy into it waits for first."""
    streams: list[Any]
    """That were handed it."""
    events: list[Event] | None
    """After which it may be overwritten; None: it is in use."""


class LoadTargets:
    """Allocates targets, each with what a copy into it has to wait for. Called with the engine's lock held.

    Args:
        device: allocates on its load stream, and records events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._dead: SimpleQueue[Target] = SimpleQueue()
        self._targets: list[Target] = []

    def reserve(self, nbytes: int) -> Target:
        """A target of `nbytes` uninitialised bytes."""
        self.note_deaths()
        tensor = self._device.load_target(nbytes)
        storage = tensor.untyped_storage()
        target = Target(storage, self._dead.put)
        target.start = storage.data_ptr()
        target.end = target.start + storage.nbytes()
        target.tensor = tensor
        target.awaited = []
        target.streams = []
        target.events = None
        others = []
        for other in self._targets:
            if other.start < target.end and target.start < other.end:
                target.awaited += self._retire(other)
                if target.start <= other.start and other.end <= target.end:
                    continue
            if other.events is None or not all(event.query() for event in other.events):
                others.append(other)
        self._targets = [*others, target]
        return target

    def take(self, target: Target) -> torch.Tensor:
        """The tensor, which from now on is alive only while others hold it."""
        tensor, target.tensor = target.tensor, None
        assert tensor is not None
        return tensor

    def hand_out(self, target: Target) -> None:
        """The current stream reads the target from now on."""
        stream = self._device.current_stream()
        if stream not in target.streams:
            target.streams.append(stream)

    def note_deaths(self) -> None:
        """Record where the streams are that used what has died since. Cheap when nothing has."""
        dead = self._dead
        while not dead.empty():
            try:
                self._retire(dead.get_nowait())
            except Empty:
                return

    def _retire(self, target: Target) -> list[Event]:
        if target.events is None:
            found = [self._device.record(stream) for stream in target.streams]
            # What it had to wait for itself, if nothing was ever copied into it, the next copy into its memory waits for.
            waited = [event for event in target.awaited if not event.query()]
            target.events = [*waited, *(event for event in found if event is not None)]
        return target.events
