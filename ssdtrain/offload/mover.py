"""The one place that changes where a region's bytes are.

```
RESIDENT -> STORING -> STORED -> LOADING -> LOADED -> STORED ...
    ^          |                                        |
    +-cancelled+ failed, forwarded       RELEASED <-----+ from any state, when the last handle is gone
    +- STAGED -+ cancelled after the tensor was let go of
```

Every method is called with the engine's lock held, and none waits for I/O. What must be waited for is an `Operation`, and the
engine waits for it outside the lock.
"""

from __future__ import annotations

import errno
import logging
from collections import deque

from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.region import Region, State, after_close, overwritten
from ssdtrain.offload.transfer import Transfer
from ssdtrain.storage import IOCancelled, IOFailure, Operation, SourceChanged, SpillStore, StoreFull

__all__ = ["Mover", "wait_quietly"]

logger = logging.getLogger("ssdtrain")


def wait_quietly(operation: Operation, timeout: float) -> bool:
    """Wait until `operation` is over, well or not: the mover sees to how it ended. False: timeout."""
    try:
        return operation.wait(timeout)
    except (IOFailure, IOCancelled, SourceChanged):
        return True


def _on_its_way(region: Region) -> bool:
    """True if the bytes are being stored, and still in their tensor."""
    return region.state is State.STORING and not region.emptied


class Mover:
    """Starts, finishes, cancels and abandons the transfers of regions.

    Args:
        store: the tiers.
        transfer: how bytes leave and enter tensors.
        statistics: counters to keep.
        raise_when_full: raise `StoreFull` when no tier has room, instead of keeping the region in memory.
    """

    def __init__(
        self,
        store: SpillStore,
        transfer: Transfer,
        statistics: OffloadMetrics,
        *,
        raise_when_full: bool = False,
    ) -> None:
        self.store = store
        self.transfer = transfer
        self.statistics = statistics
        self.in_flight = 0  # bytes of stores whose operation has not ended
        self.ahead = 0  # bytes loaded, or being loaded, that backward has not asked for yet
        self.together = 0  # bytes of stores that may wake the pool together: see `SpillStore.write`
        self._later = 0  # bytes of stores queued since the pool was woken
        self._raise_when_full = raise_when_full
        self._stores: deque[Region] = deque()  # in the order in which they began
        self._ahead: deque[Region] = deque()  # in the order in which backward will ask
        self._needed: set[Region] = set()  # being loaded, while backward waits for them
        self.device_limit = 0  # bytes of stores that may still be on the device when the next one begins
        self._on_device: deque[Region] = deque()  # stores whose tensors are still there, the oldest first
        self._on_device_bytes = 0
        self._leaving: list[Region] = []  # released, but an operation still uses their memory
        self._warned_full = False

    # Stores

    def begin_store(self, region: Region) -> bool:
        """RESIDENT -> STORING, or kept where no tier has room. False: no staging buffer now; try after a store has ended.

        Raises:
            StoreFull: no room, and `raise_when_full`.
        """
        if region.codec is not None:
            self.transfer.prepare(region)
        try:
            region.slot = self.store.reserve(region.stored_bytes, region.tier)
        except StoreFull as error:
            self._keep_for_want_of_room(region, error)
            return True
        later = self._later + region.nbytes <= self.together
        if not self.transfer.begin_store(region, later=later):
            self._free_slot(region)
            return False
        self._later = self._later + region.nbytes if later else 0
        if region.payload is not None:
            # What backward gets must not depend on how far the store has come: from here on it is the decoded payload.
            region.empty_()
            self.statistics.encoded_bytes += region.nbytes
        region.state = State.STORING
        region.wanted = region.forwarded = False
        self.in_flight += region.nbytes
        self._stores.append(region)
        self.statistics.offloaded_bytes += region.nbytes
        if self.transfer.copies and region.payload is None:
            self._depart(region)
        return True

    def keep(self, region: Region) -> None:
        """The region stays in memory: by plan, or because its store could not begin in time."""
        region.payload = None
        self.statistics.kept_bytes += region.nbytes

    def _keep_for_want_of_room(self, region: Region, error: StoreFull) -> None:
        if self._raise_when_full:
            raise error
        self.statistics.kept_full_bytes += region.nbytes
        self.keep(region)
        if not self._warned_full:
            self._warned_full = True
            # The text, not the error: a log record must not hold the traceback, and with it the region.
            logger.warning("saved tensors stay in memory from now on where no tier has room: %s", str(error))

    def furthest_ahead(self) -> Region | None:
        """What was loaded ahead last, and not asked for since."""
        return self._ahead[-1] if self._ahead else None

    def kick(self) -> None:
        """Begin the stores and loads that were queued for later."""
        self._later = 0
        self.store.kick()

    def oldest_store(self) -> Region | None:
        """The store in flight that began first."""
        return self._stores[0] if self._stores else None

    def reap(self) -> None:
        """Take note of what has ended. Cheap when nothing has."""
        stores = self._stores
        if self.transfer.copies:
            self.transfer.poll()
        while stores and (operation := stores[0].operation) is not None and operation.done():
            self._end_store(stores.popleft())
        if self._leaving:
            self._leaving = [region for region in self._leaving if not self._gone(region)]

    def _depart(self, region: Region) -> None:
        """Let the oldest stores' tensors go at this point of the tape until no more than `device_limit` bytes of them are left.

        A point of the tape, and not of time: the peak is the same in every run. What backward is about to need stays.
        """
        self._on_device.append(region)
        self._on_device_bytes += region.nbytes
        while self._on_device and (
            self._on_device_bytes > self.device_limit or not _on_its_way(self._on_device[0])
        ):
            oldest = self._on_device.popleft()
            self._on_device_bytes -= oldest.nbytes
            # One whose owner has freed it is seen to when its store ends.
            if _on_its_way(oldest) and not oldest.wanted and not oldest.freed():
                self.transfer.depart(oldest)

    def _end_store(self, region: Region) -> None:
        assert region.operation is not None
        error = region.operation.failed()
        if region.state is not State.RELEASED and error is not None:
            if isinstance(error, IOFailure):
                self._store_failed(region, error)
            else:
                self._store_cancelled(region)
            return
        self.in_flight -= region.nbytes
        if region.state is State.RELEASED:
            self.transfer.end_store(region)
            region.empty_()
        elif region.freed():
            self._leave_to_owner(region)
        elif region.wanted and region.in_tensor:
            # Backward is near and the bytes are still here: they need not come back.
            self.transfer.end_store(region)
            self._forward(region)
        elif region.loaded is not None:
            self.transfer.end_store(region)
            region.state = State.LOADED
        else:
            self.transfer.end_store(region)
            region.empty_()
            region.state = State.STORED

    def _leave_to_owner(self, region: Region) -> None:
        """Nobody knows which bytes went to the tier. See Note: [Freed under the engine]."""
        self.statistics.offloaded_bytes -= region.nbytes
        self.transfer.end_store(region)
        self._free_slot(region)
        region.state = State.RESIDENT

    def _store_cancelled(self, region: Region) -> None:
        """STORING -> RESIDENT, or STAGED where the tensor was let go of: none of its bytes are in the tier."""
        self.in_flight -= region.nbytes
        self.statistics.cancelled_bytes += region.nbytes
        self.statistics.offloaded_bytes -= region.nbytes
        self._free_slot(region)
        if region.loaded is None and region.emptied:
            region.operation = None
            region.state = State.STAGED
            return
        self.transfer.end_store(region)
        region.state = State.RESIDENT

    def _forward(self, region: Region) -> None:
        self._free_slot(region)
        region.state = State.RESIDENT
        self._count_forwarded(region)

    def _count_forwarded(self, region: Region) -> None:
        """Once for each store, however often backward asks."""
        if not region.forwarded:
            region.forwarded = True
            self.statistics.forwarded_bytes += region.nbytes

    def _store_failed(self, region: Region, error: OSError) -> None:
        """A failing drive gets no more data; the bytes, which are still in memory, go to the next tier or stay."""
        assert region.slot is not None
        self.statistics.failed_stores += 1
        # At EFAULT the memory is at fault, and no drive. See Note: [Freed under the engine].
        if error.errno != errno.EFAULT:
            self.store.retire(region.slot, error)
        if region.freed():
            self.in_flight -= region.nbytes
            self._leave_to_owner(region)
            return
        self._free_slot(region)
        try:
            region.slot = self.store.reserve(region.stored_bytes, region.tier)
        except StoreFull as full:
            self.in_flight -= region.nbytes
            self.statistics.offloaded_bytes -= region.nbytes
            recalled = region.loaded is not None or self.transfer.recall(region)
            self.transfer.end_store(region)
            region.state = State.RESIDENT
            assert recalled or region.in_tensor, "a failed store had let its bytes go"
            self._keep_for_want_of_room(region, full)
            return
        self.transfer.rewrite(region)
        self._stores.append(region)

    def stop_store(self, region: Region) -> bool:
        """STORING -> RESIDENT or STAGED if not a byte of it has been written yet: a write avoided. False: too late."""
        if region.operation is None or not region.operation.cancel():
            return False
        self._stores.remove(region)
        self._store_cancelled(region)
        return True

    def unstage(self, region: Region) -> None:
        """STAGED -> RESIDENT: bring the bytes back to the device, where backward is about to need them."""
        recalled = self.transfer.recall(region)
        assert recalled, "a staged region has its bytes in a buffer or encoded"
        self.transfer.end_store(region)
        region.state = State.RESIDENT

    def recall(self, region: Region) -> None:
        """Backward asks for a region being stored: where its bytes are in the staging buffer only, bring them back from there."""
        if region.loaded is None:
            self.transfer.recall(region)
        self._count_forwarded(region)

    # Loads

    def begin_load(self, region: Region, *, asked: bool) -> bool:
        """STORED -> LOADING. False: no buffer now.

        A load that backward asked for never waits for a buffer that only backward frees: it drops what was loaded ahead,
        the last needed first, and where that is not enough it allocates outside of the arena. It waits (False) for a buffer
        that comes back by itself: `Transfer.passing`.
        """
        if not self.transfer.begin_load(region, asked=asked):
            if not asked or self.transfer.passing() is not None:
                return False
            while self._evict():
                if self.transfer.begin_load(region, asked=True):
                    break
            else:
                self.transfer.begin_load(region, asked=True, outside=True)
                self.statistics.outside_bytes += region.nbytes
        region.state = State.LOADING
        if asked:
            self._needed.add(region)
        else:
            region.ahead = True
            self.ahead += region.nbytes
            self._ahead.append(region)
        return True

    def end_load(self, region: Region) -> None:
        """LOADING -> LOADED: the read has ended.

        Raises:
            IOFailure: it failed; the region goes back to STORED, and nothing is handed out.
            RuntimeError: the same, because it was cancelled by the end of the store, or because the tier does not have the bytes
                that were saved.
        """
        assert region.operation is not None
        self._needed.discard(region)
        error = region.operation.failed()
        if error is not None:
            self._not_ahead(region)
            self.transfer.abandon_load(region)
            region.state = State.STORED
            if isinstance(error, IOCancelled):
                raise after_close() from error
            if isinstance(error, SourceChanged):
                raise overwritten(region.dtype, region.nbytes) from error
            raise error
        self.transfer.advance_load(region)
        region.state = State.LOADED
        self.statistics.loaded_bytes += region.nbytes

    def drop_loaded(self, region: Region) -> None:
        """LOADED -> STORED: the region lets go of the buffer; tensors that were handed out own it."""
        self._not_ahead(region)
        region.loaded = region.payload = region.load_event = None
        region.drop_target()
        region.state = State.STORED

    def asked_for(self, region: Region) -> None:
        """Backward has come to this region: it is ahead no more."""
        self._not_ahead(region)

    def _not_ahead(self, region: Region) -> None:
        if region.ahead:
            region.ahead = False
            self.ahead -= region.nbytes
            self._ahead.remove(region)

    def _evict(self) -> bool:
        """Drop the load ahead that is needed last. False: there is none that can be dropped."""
        for region in reversed(self._ahead):
            if region.state is State.LOADING:
                assert region.operation is not None
                if not region.operation.cancel() and not region.operation.done():
                    continue
                self.transfer.abandon_load(region)
            self.drop_loaded(region)
            self.statistics.evicted_bytes += region.nbytes
            return True
        return False

    # Release

    def release(self, region: Region) -> None:
        """The last handle is gone: cancel what has not begun, free the slot, keep the memory that I/O still uses."""
        state = region.state
        if state is State.RELEASED:
            return
        operation = region.operation
        self._not_ahead(region)
        self._needed.discard(region)
        region.state = State.RELEASED
        region.drop_target()
        if state is State.STORING:
            assert operation is not None
            if operation.cancel():
                self._stores.remove(region)
                self.in_flight -= region.nbytes
                self.statistics.cancelled_bytes += region.nbytes
                self.statistics.offloaded_bytes -= region.nbytes
                self.transfer.end_store(region)
                region.empty_()
            # Otherwise it stays among the stores, and with it the memory that is being written from.
        elif state is State.LOADING:
            assert operation is not None
            if operation.cancel():
                self.transfer.abandon_load(region)
            else:
                self._leaving.append(region)
        else:
            if state is State.STAGED:
                self.transfer.end_store(region)
            region.loaded = region.payload = None
            region.empty_()
        self._free_slot(region)
        region.tape.remove(region)

    def _gone(self, region: Region) -> bool:
        if region.operation is not None and not region.operation.done():
            return False
        self.transfer.abandon_load(region)
        return True

    def _free_slot(self, region: Region) -> None:
        if region.slot is not None:
            self.store.free(region.slot)
            region.slot = None

    def busy(self) -> list[Region]:
        """Regions whose memory an operation uses."""
        ahead = [region for region in self._ahead if region.state is State.LOADING]
        return [*self._stores, *self._leaving, *self._needed, *ahead]
