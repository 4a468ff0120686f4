"""Where a region's bytes are is changed here, and in `loads` for the way back; nowhere else.

```
RESIDENT -> STORING -> STORED -> LOADING -> LOADED -> STORED ...
    ^          |                                        |
    +-cancelled+ failed, forwarded       RELEASED <-----+ from any state, when the last handle is gone
    +- STAGED -+ cancelled after the tensor was released
```

Every method is called with the engine's lock held, and none waits for I/O. What must be waited for is an `Operation`, and the
engine waits for it outside the lock.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque

from ssdtrain.codecs import Codec
from ssdtrain.offload.departures import Departures
from ssdtrain.offload.loads import Loads
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.region import Region
from ssdtrain.offload.transfer import Transfer
from ssdtrain.offload.transfer_state import State
from ssdtrain.storage import (
    IOCancelled,
    IOFailure,
    Operation,
    SourceChanged,
    SpillStore,
    StoreClosed,
    StoreFull,
)
from ssdtrain.storage.faults import mix

__all__ = ["Mover", "wait_quietly"]

logger = logging.getLogger("ssdtrain")


def wait_quietly(operation: Operation, timeout: float) -> bool:
    """Wait until `operation` is over, well or not: the mover sees to how it ended. False: timeout."""
    try:
        return operation.wait(timeout)
    except (IOFailure, IOCancelled, SourceChanged):
        return True


def next_verified(draw: int, verified: int) -> int:
    """In how many stores the next one is verified: in `verified` on average, and spread over the regions of a tape, however
    many there are."""
    return 1 + mix(draw + 1) % (2 * verified - 1)


class Mover:
    """Starts, finishes and cancels stores, and releases regions; `loads` does the way back. Together they own `Region.transfer`.

    Args:
        store: the tiers.
        transfer: how bytes leave and enter tensors.
        metrics: counters to keep.
        raise_when_full: raise `StoreFull` when no tier has room, instead of keeping the region in memory.
        verified: of so many stores one has a checksum of all its bytes, which is compared when they come back; 0: none has.
    """

    def __init__(
        self,
        store: SpillStore,
        transfer: Transfer,
        metrics: OffloadMetrics,
        *,
        raise_when_full: bool = False,
        verified: int = 0,
    ) -> None:
        self.store = store
        self.transfer = transfer
        self.metrics = metrics
        self.departures = Departures(self._depart)
        self.loads = Loads(transfer, metrics)
        self.in_flight = 0  # bytes of stores whose operation has not ended
        self.batch_bytes = 0  # of stores that may wake the pool together: see `SpillStore.write`
        self._deferred = 0  # bytes of stores queued since the pool was woken
        self.in_flight_limit = 0
        """Bytes of stores in flight, see `admits`; set by `TransferLimits`."""
        self._raise_when_full = raise_when_full
        self._verified = verified
        self._draws = 0  # of `next_verified`
        # The store that is verified next is the so manieth from here; 0 or less: none.
        self._next_verified = next_verified(0, verified) if verified else 0
        self._stores: deque[Region] = deque()  # in the order in which they began
        self._warned_full = False

    # Stores

    def plan(self, region: Region, codec: Codec | None, tier: str | None) -> None:
        """The region, which is resident, is to be stored: by `codec`, in `tier`; None is plain, and the first that has room."""
        region.transfer.codec = codec
        region.transfer.tier = tier

    def admits(self, region: Region) -> bool:
        """True if the stores in flight leave room for one more. A single store always has room."""
        return not self._stores or self.in_flight + region.nbytes <= self.in_flight_limit

    def begin_store(self, region: Region) -> bool:
        """RESIDENT -> STORING, or kept where no tier has room. False: no staging buffer now; try after a store has ended.

        Raises:
            StoreFull: no room, and `raise_when_full`.
        """
        transfer = region.transfer
        if transfer.codec is not None:
            self._encode(region)
        try:
            transfer.slot = self.store.reserve(transfer.stored_bytes, transfer.tier)
        except StoreFull as error:
            self._keep_for_want_of_room(region, error)
            return True
        chosen = self._next_verified == 1
        # No thread of the host sees the bytes of a pinned slot.
        transfer.verify = chosen and not self.store.is_pinned(transfer.slot)
        nbytes = region.nbytes
        deferred = self._deferred + nbytes
        defer = deferred <= self.batch_bytes
        write = self.transfer.begin_store(region, defer=defer)
        if write is None:
            self._free_slot(region)
            return False
        if chosen:
            self._draws += 1
            self._next_verified = next_verified(self._draws, self._verified)
        else:
            self._next_verified -= 1
        self._deferred = deferred if defer else 0
        encoded = transfer.payload is not None
        if encoded:
            # What backward gets must not depend on how far the store has come: from here on it is the decoded payload.
            region.empty_()
            self.metrics.encoded_bytes += nbytes
        transfer.write_began(write)
        self.in_flight += nbytes
        self._stores.append(region)
        self.metrics.offloaded_bytes += nbytes
        if self.transfer.copies and not encoded and not transfer.in_place:
            self.departures.add(region)
        return True

    def _encode(self, region: Region) -> None:
        began = time.perf_counter()
        payload = self.transfer.encode(region)
        self.metrics.count_codec(region.name, began)
        if payload is None:
            region.transfer.codec = None
        else:
            region.transfer.payload = payload
            region.transfer.stored_bytes = payload.numel()

    def _depart(self, region: Region) -> None:
        self.transfer.depart(region)
        region.empty_()

    def keep(self, region: Region) -> None:
        """The region stays in memory: by plan, or because its store could not begin in time."""
        region.transfer.payload = None
        self.metrics.kept_bytes += region.nbytes

    def keep_resident(self, region: Region) -> None:
        """Backward is near: where the bytes are still in memory when the store ends, they stay there."""
        region.transfer.keep_resident = True

    def _keep_for_want_of_room(self, region: Region, error: StoreFull | StoreClosed) -> None:
        if isinstance(error, StoreClosed):
            return self.keep(region)
        if self._raise_when_full:
            raise error
        self.metrics.kept_full_bytes += region.nbytes
        self.keep(region)
        if not self._warned_full:
            self._warned_full = True
            # The text, not the error: a log record must not hold the traceback, and with it the region.
            logger.warning("saved tensors stay in memory from now on where no tier has room: %s", str(error))

    def flush(self) -> None:
        """Begin the stores and loads that were deferred."""
        self._deferred = 0
        self.store.flush()

    def oldest_store(self) -> Operation | None:
        """Of the stores in flight, the one that began first."""
        return self._stores[0].transfer.operation if self._stores else None

    def reap(self) -> None:
        """Process the transfers that have ended. Cheap when none has."""
        stores = self._stores
        if self.transfer.copies:
            self.transfer.poll()
        while stores and (operation := stores[0].transfer.operation) is not None and operation.done():
            self._end_store(stores.popleft())
        if self.loads.leaving:
            self.loads.reap()

    def _end_store(self, region: Region) -> None:
        transfer = region.transfer
        operation = transfer.operation
        assert operation is not None
        error = operation.failed()
        if error is not None and transfer.state is not State.RELEASED:
            if isinstance(error, IOFailure):
                self._store_failed(region, error)
            else:
                self._store_cancelled(region)
            return
        if self.metrics.spans is not None:
            self.metrics.count_transfer("stores", region, operation)
        self.in_flight -= region.nbytes
        if transfer.state is State.RELEASED:
            self._close_write(region)
            region.empty_()
        elif region.freed():
            self._leave_to_owner(region)
        elif transfer.keep_resident and region.in_tensor:
            # Backward is near and the bytes are still here: they need not come back.
            self._close_write(region)
            self._free_slot(region)
            transfer.state = State.RESIDENT
            self._count_forwarded(region)
        elif transfer.loaded is not None:
            self._close_write(region)
            transfer.state = State.LOADED
        else:
            self._close_write(region)
            region.empty_()
            transfer.state = State.STORED

    def _close_write(self, region: Region) -> None:
        """The write is over, well or not, and nothing is to be done with its buffer any more."""
        self.transfer.give_back(region)
        region.transfer.write_over()

    def _leave_to_owner(self, region: Region) -> None:
        """Which bytes went to the tier is unknown. See Note: [Freed under the engine]."""
        self.metrics.offloaded_bytes -= region.nbytes
        self._close_write(region)
        self._free_slot(region)
        region.transfer.state = State.RESIDENT

    def _store_cancelled(self, region: Region) -> None:
        """STORING -> RESIDENT, or STAGED where the tensor was released: none of its bytes are in the tier."""
        self.in_flight -= region.nbytes
        self.metrics.avoided_write_bytes += region.nbytes
        self.metrics.offloaded_bytes -= region.nbytes
        self._free_slot(region)
        if region.transfer.loaded is None and region.emptied:
            region.transfer.operation = None
            region.transfer.state = State.STAGED
            return
        self._close_write(region)
        region.transfer.state = State.RESIDENT

    def _count_forwarded(self, region: Region) -> None:
        """Once for each store, however often backward asks."""
        if not region.transfer.forwarded:
            region.transfer.forwarded = True
            self.metrics.forwarded_bytes += region.nbytes

    def _store_failed(self, region: Region, error: OSError) -> None:
        """A failing drive gets no more data; the bytes, which are still in memory, go to the next tier or stay. After a failed
        write of device memory itself they stay."""
        transfer = region.transfer
        assert transfer.slot is not None
        self.metrics.failed_stores += 1
        if transfer.in_place:
            self.transfer.stop_in_place(error)  # the drive may be well: a store through host memory shows it
        # At EFAULT the memory is at fault, and no drive. See Note: [Freed under the engine].
        elif error.errno != errno.EFAULT:
            self.store.retire(transfer.slot, error)
        if region.freed():
            self.in_flight -= region.nbytes
            self._leave_to_owner(region)
            return
        self._free_slot(region)
        if transfer.in_place:
            self._undo_store(region)
            self.keep(region)
            return
        try:
            transfer.slot = self.store.reserve(transfer.stored_bytes, transfer.tier)
        except (StoreFull, StoreClosed) as none:
            self._undo_store(region)
            self._keep_for_want_of_room(region, none)
            return
        transfer.operation = self.transfer.rewrite(region)
        self._stores.append(region)

    def _undo_store(self, region: Region) -> None:
        """STORING -> RESIDENT: the store has failed, and the bytes are in memory."""
        self.in_flight -= region.nbytes
        self.metrics.offloaded_bytes -= region.nbytes
        recalled = region.transfer.loaded is not None or self.bring_back(region)
        self._close_write(region)
        region.transfer.state = State.RESIDENT
        assert recalled or region.in_tensor, "a failed store had let its bytes go"

    def stop_store(self, region: Region) -> bool:
        """STORING -> RESIDENT or STAGED if not a byte of it has been written yet: a write avoided. False: too late."""
        operation = region.transfer.operation
        if operation is None or not operation.cancel():
            return False
        self._stores.remove(region)
        self._store_cancelled(region)
        return True

    def unstage(self, region: Region) -> None:
        """STAGED -> RESIDENT: bring the bytes back to the device, where backward is about to need them."""
        recalled = self.bring_back(region)
        assert recalled, "a staged region has its bytes in a buffer or encoded"
        self._close_write(region)
        region.transfer.state = State.RESIDENT

    def bring_back(self, region: Region) -> bool:
        """Have the bytes of a region being stored in memory again. False: they are still in the tensor."""
        arrival = self.transfer.recall(region)
        if arrival is None:
            return False
        region.transfer.arrived(arrival)
        return True

    def forward(self, region: Region) -> None:
        """Backward asks for a region being stored, which it gets from the tensor or from the buffer that is written."""
        if region.transfer.loaded is None:
            self.bring_back(region)
        self._count_forwarded(region)

    # Release

    def release(self, region: Region) -> None:
        """The last handle is gone: cancel what has not begun, free the slot, keep the memory that I/O still uses."""
        transfer = region.transfer
        state, operation = transfer.state, transfer.operation
        if state is State.RELEASED:
            return
        if state is State.LOADING or state is State.LOADED:
            self.loads.forget(region)
        transfer.state = State.RELEASED
        if transfer.target is not None:
            transfer.drop_target()
        if state is State.STORING:
            assert operation is not None
            if operation.cancel():
                self._stores.remove(region)
                self.in_flight -= region.nbytes
                self.metrics.avoided_write_bytes += region.nbytes
                self.metrics.offloaded_bytes -= region.nbytes
                self._close_write(region)
                region.empty_()
            # Otherwise it stays among the stores, and with it the memory that is being written from: of a copy the buffer.
            elif self.transfer.copies and region.in_tensor and not transfer.in_place:
                self._depart(region)
        elif state is State.LOADING:
            self.loads.release(region)
        else:
            if state is State.STAGED:
                self._close_write(region)
            transfer.loaded = transfer.payload = None
            if not region.emptied:
                region.empty_()
        self._free_slot(region)
        region.tape.remove(region)

    def _free_slot(self, region: Region) -> None:
        if region.transfer.slot is not None:
            self.store.free(region.transfer.slot)
            region.transfer.slot = None

    def busy(self) -> list[Region]:
        """Regions whose memory an operation uses."""
        return [*self._stores, *self.loads.busy()]
