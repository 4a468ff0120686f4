"""Loads: a region's bytes on the way back from a tier. A part of the mover; see there for the states.

Note: [Transfers that never end]
A system call on a drive ends, or the kernel fails it. A transfer of cuFile may hang in a driver, and a copy of a device behind a
collective whose peer is gone: they are waited for until none has ended for a bounded time (`ssdtrain.patience`). After that they
may still read or fill their memory, which therefore stays as long as the process lives.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.tensors.region import Region, after_close, overwritten
from ssdtrain.offload.transfer.state import Read, State
from ssdtrain.offload.transfer.targets import NoTargetYet
from ssdtrain.offload.transfer.transfer import Transfer
from ssdtrain.storage import IOCancelled, SourceChanged

# Looked up once: each saved tensor comes by here.
_STORED, _LOADING, _LOADED = State.STORED, State.LOADING, State.LOADED

_HUNG: list[object] = []


def keep_for_ever(*memory: object) -> None:
    """Keep what a transfer uses that may never end."""
    _HUNG.extend(memory)


class Loads:
    """Starts, finishes, evicts and abandons loads. Called with the engine's lock held, and never waits.

    Args:
        transfer: how bytes enter tensors.
        metrics: counters to keep.
    """

    def __init__(self, transfer: Transfer, metrics: OffloadMetrics) -> None:
        self.transfer = transfer
        self.metrics = metrics
        self.prefetched_bytes = 0  # loaded, or being loaded, that backward has not asked for yet
        self._prefetched: deque[Region] = deque()  # in the order in which backward will ask
        self._needed: set[Region] = set()  # being loaded, while backward waits for them
        self.leaving: list[Region] = []
        """Released, but an operation still uses their memory."""

    def begin(self, region: Region, *, on_demand: bool) -> bool:
        """STORED -> LOADING, or LOADED at once where it is pinned. False: no buffer now.

        A load that backward asked for never waits for a buffer that only backward frees: it drops what was prefetched,
        the last needed first, and where that is not enough it allocates outside of the arena. It waits (False) for a buffer
        that comes back by itself: `Transfer.returning`.
        """
        transfer = region.transfer
        if transfer.pinned:
            arrival = self.transfer.copy_back(region)
            transfer.arrived(arrival)
            transfer.event = arrival.event
            transfer.state = _LOADED
            self.metrics.loaded_bytes += transfer.moved_bytes
            return True
        read = self._begin(region, on_demand)
        if read is None:
            if not on_demand or self.transfer.returning() is not None:
                return False
            while read is None and self._evict():
                read = self.transfer.begin_load(region, on_demand=True)
            if read is None:
                read = self.transfer.begin_load(region, on_demand=True, allow_unpooled=True)
                self.metrics.outside_bytes += region.nbytes
        assert read is not None
        transfer.read_began(read)
        if on_demand:
            self._needed.add(region)
        else:
            transfer.prefetched = True
            self.prefetched_bytes += region.nbytes
            self._prefetched.append(region)
        return True

    def _begin(self, region: Region, on_demand: bool) -> Read | None:
        while True:
            try:
                return self.transfer.begin_load(region, on_demand=on_demand)
            except NoTargetYet:
                raise
            except torch.OutOfMemoryError:
                if not self._evict(in_place=True):
                    raise

    def nearest_prefetched(self) -> Region:
        """Return what was prefetched first, and not asked for since: where there are `prefetched_bytes`."""
        return self._prefetched[0]

    def reserve_target(self, region: Region) -> None:
        """Have the device memory for a region whose load is under way. See Note: [Load targets]."""
        transfer = region.transfer
        if transfer.state is _LOADING and transfer.in_place:
            return  # it is being filled
        if transfer.target is None or transfer.target.tensor is None:  # none yet, or that of an earlier load
            transfer.target = self.transfer.reserve_target(region)

    def end(self, region: Region) -> bool:
        """LOADING -> LOADED: the read has ended. False: it failed to fill device memory itself, and the region, which is STORED
        again, can be read through host memory.

        Raises:
            IOFailure: it failed; the region goes back to STORED, and nothing is handed out.
            RuntimeError: the same, because it was cancelled by the end of the store, or because the tier does not have the bytes
                that were saved.
        """
        transfer = region.transfer
        operation = transfer.operation
        assert operation is not None
        self._needed.discard(region)
        error = operation.failed()
        if error is not None:
            if transfer.prefetched:
                self._not_prefetched(region)
            self._abandon(region)
            transfer.state = _STORED
            if isinstance(error, IOCancelled):
                raise after_close() from error
            if isinstance(error, SourceChanged):
                # Where all bytes were compared, the drive returned what it was given.
                raise overwritten(region.dtype, region.nbytes, None if operation.digest else error) from error
            if transfer.in_place:
                self.transfer.stop_in_place(error)
                return False
            raise error
        # Before anything is counted: it may find no memory, and be tried again.
        arrival = self.transfer.advance_load(region)
        if self.metrics.spans is not None:
            self.metrics.count_transfer("loads", region, operation)
        if operation.digest:
            self.metrics.verified_bytes += transfer.moved_bytes
        if arrival is not None:
            transfer.arrived(arrival)
        transfer.operation = transfer.lease = None
        transfer.state = _LOADED
        self.metrics.loaded_bytes += transfer.moved_bytes
        return True

    def give_up(self, region: Region) -> None:
        """LOADING -> STORED if a read that fills device memory itself takes for ever: all go through host memory from now
        on. One that still waits for the device is only begun again."""
        transfer = region.transfer
        operation = transfer.operation
        if not transfer.in_place or operation is None or operation.done():
            return
        event = transfer.load_event
        waits_for_device = event is not None and not event.query()
        cancelled = operation.cancel()
        if not cancelled and operation.done():
            return
        self._needed.discard(region)
        if not cancelled:
            keep_for_ever(operation, transfer.loaded, transfer.payload, event)
        if not waits_for_device:  # it has begun, or those before it have hung
            self.transfer.stop_in_place(TimeoutError(f"a read of {region.nbytes} bytes has not ended"))
        transfer.operation = None
        transfer.in_place = False
        self._drop(region)

    def hand_out(self, region: Region) -> None:
        """Backward gets the region now: what it does is ordered after the load."""
        transfer = region.transfer
        copied_or_encoded = self.transfer.copies or transfer.payload is not None
        if copied_or_encoded and (transfer.loaded is not None or transfer.state is _LOADED):
            began = 0.0 if transfer.loaded is not None else time.perf_counter()
            decoded = self.transfer.end_load(region)
            if decoded is not None:
                self.metrics.count_codec(region.name, began)
                transfer.decoded(decoded)
        if transfer.prefetched:
            self._not_prefetched(region)

    def let_go(self, region: Region) -> None:
        """What was handed out owns the loaded bytes, or has changed them: they are not handed out again."""
        transfer = region.transfer
        if transfer.state is _LOADED:
            transfer.drop_loaded()
            transfer.state = _STORED
        else:
            transfer.loaded = None

    def _drop(self, region: Region) -> None:
        """LOADED -> STORED."""
        transfer = region.transfer
        if transfer.prefetched:
            self._not_prefetched(region)
        transfer.drop_loaded()
        transfer.state = _STORED

    def _not_prefetched(self, region: Region) -> None:
        """It was until now."""
        region.transfer.prefetched = False
        self.prefetched_bytes -= region.nbytes
        self._prefetched.remove(region)

    def _evict(self, *, in_place: bool = False) -> bool:
        """Drop the prefetched region that is needed last, for its buffer, or where `in_place` for the device memory that it fills
        itself. False: there is none that can be dropped."""
        for region in reversed(self._prefetched):
            if in_place != region.transfer.in_place:
                continue
            if not in_place and self.transfer.copies and region.transfer.lease is None:
                continue  # on the device, or on the way there without a buffer; or its buffer comes back with its copy
            if region.transfer.state is _LOADING:
                operation = region.transfer.operation
                assert operation is not None
                if not operation.cancel() and not operation.done():
                    continue
                self._abandon(region)
            self._drop(region)
            self.metrics.evicted_bytes += region.nbytes
            return True
        return False

    def _abandon(self, region: Region) -> None:
        """Let go of the buffers of a load that was cancelled, failed or is of no use any more."""
        self.transfer.give_back(region)
        region.transfer.operation = region.transfer.lease = None
        region.transfer.drop_loaded()

    # Release

    def forget(self, region: Region) -> None:
        """Backward does not need the region any more."""
        if region.transfer.prefetched:
            self._not_prefetched(region)
        self._needed.discard(region)

    def release(self, region: Region) -> None:
        """The region is being loaded, and is not needed any more: cancel, or keep its memory until the read has ended."""
        operation = region.transfer.operation
        assert operation is not None
        if operation.cancel():
            self._abandon(region)
        else:
            self.leaving.append(region)

    def reap(self) -> None:
        """Let go of released regions whose reads have ended."""
        self.leaving = [region for region in self.leaving if not self._gone(region)]

    def _gone(self, region: Region) -> bool:
        if region.transfer.operation is not None and not region.transfer.operation.done():
            return False
        self._abandon(region)
        return True

    def busy(self) -> list[Region]:
        """Regions whose memory a read uses."""
        loading = [region for region in self._prefetched if region.transfer.state is _LOADING]
        return [*self.leaving, *self._needed, *loading]
