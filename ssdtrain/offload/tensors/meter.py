"""Activation memory: the bytes that are alive for backward, counted as they come and go.

Counted are the whole storages of saved tensors, each once however many views of it were saved, for as long as the storage
really lives: also while other code holds it, since its bytes are in memory all the same. Parameters and buffers are not
counted. `adjust` adds what is not a saved storage: the arena.

Beside that stands what would be alive if nothing left memory: a saved storage until it has died and the last region over it was
released.

Note: [Peaks]
Bytes come with each save, and go when something has died. So a peak is looked for before bytes go, and when it is read.

torch keeps the Python object of a storage as long as the storage itself, so a weak reference to it dies exactly when the
memory goes. That may be anywhere, in the middle of a cyclic collection too: C code puts the reference into a queue, and no Python
runs in which an exception could be lost.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from ssdtrain.offload.metrics import OffloadMetrics

if TYPE_CHECKING:
    from ssdtrain.offload.tensors.region import Region


class Peaks(NamedTuple):
    """The most bytes that were alive for backward."""

    alive: int = 0
    unoffloaded: int = 0
    """Bytes that would have been, had nothing left memory."""


class Seen(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted: under which key, with how many bytes, and the regions over it that autograd still needs."""

    __slots__ = ("key", "nbytes", "regions")

    own = False
    """It would not be there if nothing left memory."""
    key: int
    """`id` of the storage; 0: its death has been noticed."""
    nbytes: int
    regions: list[Region]

    def died(self) -> None:
        """It is a buffer, and has been taken off. Called with the engine's lock held."""


class SeenBuffer(Seen):
    """A buffer of the engine."""

    __slots__ = ()

    own = True


SomeSeen = TypeVar("SomeSeen", bound=Seen)


class ActivationMeter:
    """Live and peak bytes of saved storages. Not thread-safe by itself: the engine calls it under its lock."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.unoffloaded_bytes = 0
        """Bytes that would be alive for backward now if nothing had left memory."""
        # Up to the last `_note_peaks`: since `begin_recent`, and from `reset_peak` until then.
        self._recent = self._unoffloaded_recent = 0
        self._before = self._unoffloaded_before = 0
        self.record = False
        """Whether `timeline`, (seconds, bytes) after every change that was noticed, is kept for a plot; see `start_timeline`."""
        self._recorders = 0
        self.clock: Callable[[], float] = time.perf_counter
        """Clock of `timeline`, in seconds."""
        self.timeline: list[tuple[float, int]] = []
        self._seen: dict[int, Seen] = {}
        self._dead: SimpleQueue[Seen] = SimpleQueue()
        self._died = self._dead.put
        self.settled = self._dead.empty
        """`settled()`: nothing has died that `drain` would take off."""

    @property
    def peak_bytes(self) -> int:
        """The most of `live_bytes` since `reset_peak`."""
        return max(self._before, self._recent, self.live_bytes)

    @property
    def unoffloaded_peak_bytes(self) -> int:
        """The most of `unoffloaded_bytes` since `reset_peak`."""
        return max(self._unoffloaded_before, self._unoffloaded_recent, self.unoffloaded_bytes)

    def see(self, storage: torch.UntypedStorage, kind: type[SomeSeen] = Seen) -> SomeSeen:  # type: ignore[assignment]
        """Count `storage` from now until it dies, if it is not counted already.

        Args:
            kind: `Seen` of what autograd saved, or one of a buffer of the engine.
        """
        key = id(storage)
        known = self._seen.get(key)
        if known is not None:
            if known() is storage:
                return known  # type: ignore[return-value]
            # A dead storage's key, reused before its death was drained.
            self.drain()
        elif not self.settled():
            self.drain()  # what has died is not there together with this one
        seen = self._seen[key] = kind(storage, self._died)
        seen.key = key
        seen.nbytes = nbytes = storage.nbytes()
        seen.regions = []
        if not kind.own:
            self.unoffloaded_bytes += nbytes
        self.live_bytes += nbytes
        if self.record:
            self._record()
        return seen

    def see_own(self, storage: torch.UntypedStorage) -> None:
        """Count a buffer of the engine until it dies."""
        self.see(storage, SeenBuffer)

    def release(self, region: Region) -> None:
        """Autograd needs this region no more."""
        seen = region.seen
        seen.regions.remove(region)
        if not (seen.key or seen.regions or seen.own):
            if self.unoffloaded_bytes > self._unoffloaded_recent:
                self._unoffloaded_recent = self.unoffloaded_bytes
            self.unoffloaded_bytes -= seen.nbytes

    def adjust(self, nbytes: int) -> None:
        """Add `nbytes` (negative: subtract) that are alive for backward but are no saved storage."""
        self._note_peaks()
        self.live_bytes += nbytes
        if self.record:
            self._record()

    def _note_peaks(self) -> None:
        """See Note: [Peaks]."""
        if self.live_bytes > self._recent:
            self._recent = self.live_bytes
        if self.unoffloaded_bytes > self._unoffloaded_recent:
            self._unoffloaded_recent = self.unoffloaded_bytes

    def _record(self) -> None:
        self.timeline.append((self.clock(), self.live_bytes))

    def start_timeline(self) -> None:
        """Keep the timeline from now on, until `stop_timeline` was called as often."""
        self._recorders += 1
        self.record = True

    def stop_timeline(self) -> None:
        """One that started the timeline has read it: the last one clears it."""
        self._recorders -= 1
        if not self._recorders:
            self.record, self.timeline = False, []

    def drain(self) -> None:
        """Take off what has died. Cheap when nothing has."""
        settled = self.settled
        if settled():
            return
        self._note_peaks()
        known, take = self._seen, self._dead.get_nowait
        while not settled():
            seen = take()
            del known[seen.key]
            seen.key = 0
            self.live_bytes -= seen.nbytes
            if seen.own:
                seen.died()
            elif not seen.regions:
                self.unoffloaded_bytes -= seen.nbytes
        if self.record:
            self._record()

    def begin_recent(self) -> Peaks:
        """Return the peaks since the last call; the next one counts from now."""
        self._note_peaks()
        found = Peaks(self._recent, self._unoffloaded_recent)
        self._before, self._unoffloaded_before = self.peak_bytes, self.unoffloaded_peak_bytes
        self._recent, self._unoffloaded_recent = self.live_bytes, self.unoffloaded_bytes
        return found

    def reset_peak(self) -> None:
        """Start a new peak and a new timeline from what is alive now."""
        self.drain()
        self._before = self._recent = self.live_bytes
        self._unoffloaded_before = self._unoffloaded_recent = self.unoffloaded_bytes
        self.timeline = [(self.clock(), self.live_bytes)] if self.record else []

    def write_to(self, metrics: OffloadMetrics) -> None:
        """Set the gauges that this counts."""
        metrics.activation_bytes = self.live_bytes
        metrics.activation_peak_bytes = self.peak_bytes
        metrics.unoffloaded_peak_bytes = self.unoffloaded_peak_bytes
