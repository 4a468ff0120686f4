"""Where a region's bytes are is changed here, and in `loads` for the way back; nowhere else.

```
RESIDENT -> STORING -> STORED -> LOADING -> LOADED -> STORED ...
    ^          |          +------ pinned ----^  |
    +-cancelled+ failed, forwarded  RELEASED <--+ from any state, when the last handle is gone
    +- STAGED -+ cancelled after the tensor was released, or kept encoded
```

Every method is called with the engine's lock held, and none waits for I/O. What must be waited for is an `Operation`, and the
engine waits for it outside the lock.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from contextlib import nullcontext

from torch import OutOfMemoryError

from ssdtrain.codecs import HEADER_BYTES, Codec
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.pacing.limits import Departures, StoresInFlight
from ssdtrain.offload.policy import Action
from ssdtrain.offload.tensors.geometry import ALIGNED, lead_of
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.coding import OWN_MEMORY
from ssdtrain.offload.transfer.loads import Loads
from ssdtrain.offload.transfer.rests import moved_bytes
from ssdtrain.offload.transfer.state import PayloadCheck, State
from ssdtrain.offload.transfer.transfer import Transfer
from ssdtrain.storage import IOFailure, Operation, Slot, SpillStore, StoreClosed, StoreFull

logger = logging.getLogger("ssdtrain")

# Looked up once: each saved tensor comes by here.
_RESIDENT, _STORING, _STAGED, _STORED = State.RESIDENT, State.STORING, State.STAGED, State.STORED
_LOADING, _LOADED, _RELEASED = State.LOADING, State.LOADED, State.RELEASED


class Mover:
    """Starts, finishes and cancels stores, and releases regions; `loads` does the way back. Together they own `Region.transfer`.

    Args:
        store: the tiers.
        transfer: how bytes leave and enter tensors.
        metrics: counters to keep.
        raise_when_full: raise `StoreFull` when no tier has room, instead of keeping the region in memory.
    """

    def __init__(
        self, store: SpillStore, transfer: Transfer, metrics: OffloadMetrics, *, raise_when_full: bool = False
    ) -> None:
        self.store = store
        self.transfer = transfer
        self.metrics = metrics
        self.departures = Departures(self._depart, self._leave, self._stay)
        self.loads = Loads(transfer, metrics)
        self.batch_bytes = 0  # of stores that may wake the pool together: see `SpillStore.write`
        self.defers = True  # they may
        self._deferred = 0  # bytes of stores queued since the pool was woken
        self._raise_when_full = raise_when_full
        self.stores = StoresInFlight(self._end_store)
        # Of what is to stay encoded, the oldest first.
        self._checks: deque[tuple[Region, PayloadCheck]] = deque()
        self._warned_full = False

    # Stores

    def plan(self, region: Region, codec: Codec | None, action: Action) -> None:
        """The region, which is resident, is to be stored by `codec` (None: its plain bytes), as `action` says. ValueError: see
        `moved_bytes`."""
        transfer = region.transfer
        transfer.planned = True
        transfer.codec, transfer.tier = codec, action.tier
        if action.must_write:  # one at a time: a drive slower than the steps would be given ever more
            transfer.must_write = not any(one.transfer.must_write for one in self.stores)
        if action.part != 1:
            nbytes = moved_bytes(region.nbytes, action)
            transfer.moved_bytes = transfer.stored_bytes = nbytes if codec is None else region.nbytes
            transfer.saved_before = self.metrics.saved_bytes

    def admits(self, region: Region) -> bool:
        """Return True if the stores in flight leave room for one more."""
        return region.transfer.tier == OWN_MEMORY or self.stores.admits(region.transfer.moved_bytes)

    def begin_store(self, region: Region) -> bool:
        """RESIDENT -> STORING, or kept where no tier has room, or encoded where it is. False: no staging buffer now; try after a
        store has ended.

        Raises:
            StoreFull: no room, and `raise_when_full`.
        """
        transfer, nbytes = region.transfer, region.nbytes
        address = region.pointer + region.start
        if address % ALIGNED:
            transfer.lead = lead_of(region.pointer, region.start, region.tensor.device)
        # 1. What is stored: all of its bytes, a payload, or a part.
        if planned := transfer.planned:
            if transfer.codec is not None and transfer.payload is None:  # else there was no room
                self._encode(region, transfer.codec)
            if transfer.tier == OWN_MEMORY:
                self._keep_encoded(region)
                return True
            if transfer.moved_bytes != nbytes:
                transfer.rest = self.transfer.rests.take(region)
                if transfer.rest is None:  # no memory for it: it leaves whole
                    transfer.moved_bytes = transfer.stored_bytes = nbytes
        # 2. Its slot, and the copy or the write.
        try:
            slot = transfer.slot = self._reserve(region) if planned else self.store.reserve(nbytes)
        except StoreFull as error:
            self._keep_for_want_of_room(region, error)
            return True
        if slot.pinned and transfer.payload is None:
            transfer.event = self.transfer.copy_out(address, slot)
            transfer.pinned = True
            transfer.state = _STORING
        elif not self._begin_write(region):
            return False
        # 3. It is counted, and leaves a device in its turn.
        metrics = self.metrics
        if planned:
            moved = transfer.moved_bytes
            metrics.kept_bytes += nbytes - moved
            metrics.offloaded_bytes += moved
            if transfer.payload is not None:
                # What backward gets must not depend on how far the store has come: from here on it is the decoded payload.
                region.empty_()
                metrics.encoded_bytes += moved
                metrics.payload_bytes += transfer.stored_bytes
        else:
            metrics.offloaded_bytes += nbytes
        if transfer.pinned or (self.transfer.copies and not transfer.in_place):
            if transfer.rest is None:
                self.departures.add(region)
            else:
                self.departures.add_part(region, metrics.saved_bytes)
        return True

    def _begin_write(self, region: Region) -> bool:
        """RESIDENT -> STORING. False: no staging buffer now."""
        transfer = region.transfer
        nbytes = transfer.moved_bytes
        deferred = self._deferred + nbytes
        defer = self.defers and deferred <= self.batch_bytes
        write = self.transfer.begin_store(region, defer=defer)
        if write is None:
            transfer.rest = None
            self._free_slot(region)
            return False
        self._deferred = deferred if defer else 0
        transfer.write_began(write)
        self.stores.nbytes += nbytes
        self.stores.append(region)
        return True

    def _encode(self, region: Region, codec: Codec) -> None:
        leaves = region.transfer.tier != OWN_MEMORY
        largest = self.transfer.largest if leaves else None
        if codec.may_overflow and largest is not None and largest < region.nbytes + HEADER_BYTES:
            region.transfer.codec = None  # only without a header it fits through
            return
        if (
            codec.may_overflow
            and leaves
            and self.transfer.copies
            and not self.departures.admits_payload(region)
        ):
            region.transfer.codec = None
            self.metrics.uncoded_bytes += region.nbytes
            return
        began = time.perf_counter()
        try:
            encoded = self.transfer.encode(region)
        except OutOfMemoryError:
            if not codec.may_overflow:
                raise  # what backward gets must not depend on free memory
            region.transfer.codec = None
            self.metrics.uncoded_bytes += region.nbytes
            return
        self.metrics.count_codec(region.name, began)
        if encoded is not None:
            region.transfer.encoded(encoded)
            return
        region.transfer.codec = None
        if codec.may_overflow:
            self.metrics.overflowed_bytes += region.nbytes

    def _keep_encoded(self, region: Region) -> None:
        """RESIDENT -> STAGED, when it is known that the codec holds the region. See Note: [Kept encoded] in `coding`."""
        if region.transfer.payload is None:
            self.keep(region)
            return
        check = self.transfer.check_payload(region)
        if check is None:
            self._stays_encoded(region)
        else:
            self._checks.append((region, check))

    def _stays_encoded(self, region: Region) -> None:
        region.empty_()
        region.transfer.kept_encoded()
        self.metrics.kept_bytes += region.nbytes
        self.metrics.kept_encoded_bytes += region.nbytes

    def _reap_checks(self) -> None:
        while self._checks and self._checks[0][1].event.query():
            region, check = self._checks.popleft()
            if region.transfer.state is not _RESIDENT or region.transfer.payload is None:
                continue  # released
            overflowed = bool(check.flag.item())
            if overflowed:
                self.metrics.overflowed_bytes += region.nbytes
            if overflowed or region.last_pass >= 0:  # or backward has had it
                self.keep(region)
            else:
                self._stays_encoded(region)

    def _reserve(self, region: Region) -> Slot:
        transfer = region.transfer
        return self.store.reserve(transfer.stored_bytes, transfer.tier, spare=transfer.spare_bytes)

    def _depart(self, region: Region) -> None:
        """Do as `_leave`, behind the copy off the device."""
        if (event := region.transfer.event) is not None and not event.query():
            self.transfer.depart(region)
        self._leave(region)

    def _leave(self, region: Region) -> None:
        """Let what was copied off the device leave it: the payload, or the bytes of the tensor. A pinned one is STORED then."""
        transfer = region.transfer
        if transfer.payload is not None:
            transfer.payload = None
        elif not region.let_go():
            if transfer.pinned:  # else it is seen to when its store ends
                self._leave_to_owner(region)
            return
        if transfer.pinned:
            transfer.state = _STORED

    def keep(self, region: Region) -> None:
        """The region stays in memory: by plan, or because its store could not begin in time."""
        region.transfer.payload = region.transfer.rest = None
        self.metrics.kept_bytes += region.nbytes
        if self.departures.parting:
            self.departures.advance(self.metrics.saved_bytes)

    def abandon(self, region: Region) -> None:
        """Do as `keep`, where a graph may be being captured: no event is asked."""
        region.transfer.payload = region.transfer.rest = None
        self.metrics.kept_bytes += region.nbytes

    def keep_resident(self, region: Region) -> None:
        """Backward is near: where the bytes are still in memory when the store ends, they stay there."""
        region.transfer.keep_resident = True

    def keep_tail(self, tape: Tape) -> None:
        """The backward of `tape` begins: see Note: [Departure in order]. What has not been written need not be."""
        if not self.stores.in_order:
            return
        for region in [one for one in self.stores if one.tape is tape]:
            if not region.transfer.keep_resident and not self.stop_store(region):
                self.keep_resident(region)

    def _keep_for_want_of_room(self, region: Region, error: StoreFull | StoreClosed) -> None:
        if isinstance(error, StoreClosed):
            return self.keep(region)
        if self._raise_when_full:
            region.transfer.rest = None
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

    def reap(self) -> None:
        """Process the transfers that have ended. Cheap when none has."""
        if self.transfer.copies:
            self.transfer.poll()
            self.departures.reap()
        if self._checks:
            self._reap_checks()
        if self.stores:
            self.stores.reap()
        if self.loads.leaving:
            self.loads.reap()

    def _end_store(self, region: Region, operation: Operation) -> None:
        transfer = region.transfer
        error = operation.failed()
        if error is not None and transfer.state is not _RELEASED:
            if isinstance(error, IOFailure):
                self._store_failed(region, error)
            else:
                self._store_cancelled(region)
            return
        if self.metrics.spans is not None:
            self.metrics.count_transfer("stores", region, operation)
        if transfer.spare_bytes and transfer.state is not _RELEASED and not self._in_tier(region):
            self._store_again(region)
            return
        self.stores.nbytes -= transfer.moved_bytes
        if transfer.state is _RELEASED:
            self._close_write(region)
            self._free_slot(region)
            region.empty_()
        elif region.freed():
            self._leave_to_owner(region)
        elif transfer.keep_resident and region.in_tensor:
            self._stay(region)
        elif transfer.loaded is not None:
            self._close_write(region)
            transfer.state = _LOADED
        elif transfer.keep_resident and (payload := transfer.payload) is not None:
            # The same, encoded.
            self._close_write(region)
            transfer.payload = payload
            transfer.state = _LOADED
            self._count_forwarded(region)
        else:
            self._close_write(region)
            if region.pointer:
                region.empty_()
            transfer.state = _STORED

    def _in_tier(self, region: Region) -> bool:
        """Whether the tier holds the region: False if its payload has overflowed, and is stored without the values."""
        transfer = region.transfer
        overflowed = self.transfer.overflowed(region)
        transfer.spare_bytes = 0
        if not overflowed:
            return True
        self.metrics.overflowed_bytes += region.nbytes
        self.metrics.encoded_bytes -= region.nbytes
        self.metrics.payload_bytes -= transfer.stored_bytes
        transfer.overflowed(region.nbytes, HEADER_BYTES)
        # Where there is none the device has copied to the slot itself, where they are behind the header.
        return transfer.lease is None

    def _stay(self, region: Region) -> None:
        """STORING -> RESIDENT: backward is near and the bytes are still here, so that they need not come back."""
        if region.freed():
            self._leave_to_owner(region)
            return
        self._free_slot(region)
        self._close_write(region)
        region.transfer.stays_resident()
        self._count_forwarded(region)

    def _close_write(self, region: Region) -> None:
        """The write is over, well or not, and nothing is to be done with its buffer any more."""
        if self.transfer.copies:
            self.transfer.give_back(region)
        region.transfer.write_over()

    def _leave_to_owner(self, region: Region) -> None:
        """Which bytes went to the tier is unknown. See Note: [Freed under the engine]."""
        self._uncount(region)
        self._free_slot(region)
        self._close_write(region)
        region.transfer.stays_resident()

    def _uncount(self, region: Region) -> None:
        """It has not left, and of a part the rest has not stayed: what becomes of the whole is counted by others."""
        nbytes = region.transfer.moved_bytes
        self.metrics.offloaded_bytes -= nbytes
        self.metrics.kept_bytes -= region.nbytes - nbytes

    def _store_cancelled(self, region: Region) -> None:
        """STORING -> RESIDENT, or STAGED where the tensor was released: none of its bytes are in the tier."""
        self._count_cancelled(region)
        self._free_slot(region)
        if region.transfer.loaded is None and region.emptied:
            region.transfer.operation = None
            region.transfer.state = _STAGED
            return
        self._close_write(region)
        region.transfer.stays_resident()

    def _count_cancelled(self, region: Region) -> None:
        nbytes = region.transfer.moved_bytes
        self.stores.nbytes -= nbytes
        self.metrics.avoided_write_bytes += nbytes
        self.metrics.offloaded_bytes -= nbytes

    def _count_forwarded(self, region: Region) -> None:
        """Once for each store, however often backward asks."""
        if not region.transfer.forwarded:
            region.transfer.forwarded = True
            self.metrics.forwarded_bytes += region.transfer.moved_bytes

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
            self.stores.nbytes -= region.transfer.moved_bytes
            self._leave_to_owner(region)
            return
        if transfer.in_place:
            self._free_slot(region)
            self._undo_store(region)
            self.keep(region)
            return
        self._store_again(region)

    def _store_again(self, region: Region) -> None:
        """Write what is to be stored to another slot; where no tier has room, the region stays in memory."""
        transfer = region.transfer
        self._free_slot(region)
        try:
            transfer.slot = self._reserve(region)
        except (StoreFull, StoreClosed) as none:
            self._undo_store(region)
            self._keep_for_want_of_room(region, none)
            return
        transfer.operation = self.transfer.rewrite(region)
        self.stores.append(region)

    def _undo_store(self, region: Region) -> None:
        """STORING -> RESIDENT: the store has failed, and the bytes are in memory."""
        transfer = region.transfer
        self.stores.nbytes -= transfer.moved_bytes
        self._uncount(region)
        # Whoever has looked at the ends of stores cannot try it again.
        with self.transfer.targets.waiting() if self.transfer.targets is not None else nullcontext():
            recalled = transfer.loaded is not None or self.bring_back(region)
        self._close_write(region)
        transfer.stays_resident()
        assert recalled or region.in_tensor, "a failed store had let its bytes go"

    def stop_store(self, region: Region) -> bool:
        """STORING -> RESIDENT or STAGED if not a byte of it has been written yet: a write avoided. False: too late."""
        operation = region.transfer.operation
        if operation is None or region.transfer.must_write or not operation.cancel():
            return False
        self.stores.remove(region)
        self._store_cancelled(region)
        return True

    def unstage(self, region: Region) -> None:
        """STAGED -> RESIDENT: bring the bytes back to the device, where backward is about to need them."""
        recalled = self.bring_back(region)
        assert recalled, "a staged region has its bytes in a buffer or encoded"
        self._close_write(region)
        region.transfer.stays_resident()

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
        state = transfer.state
        transfer.state = _RELEASED
        if state is _RELEASED:
            return
        if state is _LOADING or state is _LOADED:
            self.loads.forget(region)
        else:
            transfer.loaded = None  # no read fills it
        if transfer.target is not None:
            transfer.drop_target()
        if state is _STORING:
            self._release_store(region)
        elif state is _LOADING:
            self.loads.release(region)
        else:
            if state is _STAGED:
                self._close_write(region)
            transfer.loaded = transfer.payload = None
            if region.pointer:
                region.empty_()
        transfer.rest = None
        if transfer.pinned or state is not _STORING or not transfer.must_write:  # else it would be cancelled
            self._free_slot(region)
        region.tape.remove(region)

    def _release_store(self, region: Region) -> None:
        transfer, operation = region.transfer, region.transfer.operation
        if operation is not None and not transfer.must_write and operation.cancel():
            self.stores.remove(region)
            self._count_cancelled(region)
            self._close_write(region)
            region.empty_()
        # Otherwise it stays among the stores, and with it the memory that is being written from: of a copy the buffer.
        elif self.transfer.copies and region.on_device and not transfer.in_place:
            if (event := transfer.event) is not None and not event.query():
                self.transfer.depart(region)
            transfer.payload = None
            region.empty_()

    def _free_slot(self, region: Region) -> None:
        transfer = region.transfer
        if transfer.slot is not None:
            self.store.free(transfer.slot, transfer.event if transfer.pinned else None)
            transfer.slot = None

    def busy(self) -> list[Region]:
        """Regions whose memory an operation uses."""
        return [*self.stores, *self.loads.busy()]
