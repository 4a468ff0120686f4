"""Moves the bytes of a storage to and from a slot of a tier: in place on the CPU, through pinned host memory for a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property, partial

import torch

from ssdtrain.codecs import kernels
from ssdtrain.device import Device, Event
from ssdtrain.device.cuda import UNPIN_TIMEOUT
from ssdtrain.patience import Patience
from ssdtrain.storage import Arena, Lease, Operation, Slot, SpillStore, signals_deferred


def failure_of(transfer: StateTransfer | Operation) -> Exception | None:
    """Wait for the end of a transfer. Returns its failure; raises what a signal handler raises while the transfer goes on."""
    try:
        transfer.wait()
    except Exception as error:
        if not transfer.done():
            raise
        return error
    return None


def nothing() -> None:
    """Wait for nothing."""


class HostCopy:
    """Bytes of a tensor in host memory.

    Args:
        tensor: shows them.
        wait: blocks until they are there; any thread may call it.
        buffer: whose memory it is; None: that of the tensor of which this is no copy, or that of `slot`.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        wait: Callable[[], object] = nothing,
        buffer: _HostBuffer | None = None,
        slot: Slot | None = None,
    ) -> None:
        self.tensor = tensor
        self.wait = wait
        self.buffer = buffer
        self.slot = slot

    def release(self) -> None:
        """Give the buffer back: its bytes are not needed any more."""
        if self.buffer is not None:
            self.buffer.release()
            self.buffer = None


class StateTransfer:
    """A load or a store in flight: an operation on the memory of a storage, which it keeps."""

    def __init__(self, operation: Operation, storage: torch.UntypedStorage) -> None:
        self._operation = operation
        self._storage = storage

    def done(self) -> bool:
        """Return whether `wait` would not block, or only for the device."""
        return self._operation.done()

    def wait(self) -> None:
        """Wait for the end; after a load, the storage has its bytes for what the current stream is given next.

        Raises:
            IOFailure: it failed. After a load the storage must not be used.
        """
        self._operation.wait()

    def discard(self) -> None:
        """Release what the bytes passed through. It has ended, or failed."""


class StateTransfers:
    """Starts transfers between slots and storages in host memory itself. Only `make_room` waits: the others are called while
    signals are deferred.

    Args:
        store: the tiers.
        verify: compare a checksum of all bytes.

    Attributes:
        frees_at_once: the memory of a storage may be freed when its store has begun, not only when it has ended.
    """

    frees_at_once = False

    def __init__(self, store: SpillStore, *, verify: bool) -> None:
        self._store = store
        self._verify = verify

    def make_room(self, nbytes: int) -> None:
        """Wait, where a transfer of `nbytes` needs host memory, until there is some or all transfers have ended."""

    def load(self, slot: Slot, storage: torch.UntypedStorage) -> StateTransfer:
        """Load into an empty storage, which is allocated when `wait` has returned, or before."""
        storage.resize_(slot.nbytes)
        return StateTransfer(self._store.read(slot, storage.data_ptr(), memory=storage), storage)

    def store(self, slot: Slot, storage: torch.UntypedStorage) -> StateTransfer:
        return StateTransfer(self._store.write(slot, storage.data_ptr(), verify=self._verify), storage)

    def store_where(self, flag: torch.Tensor, slot: Slot, storage: torch.UntypedStorage) -> bool:
        """Store if `flag`, bool [] on the device, is set, which nobody waits for. Returns False if that cannot be done here."""
        return False

    def steps_in(self, slot: Slot) -> bool:
        """Return whether `to_host` gives the memory of `slot` itself, so that what is stepped there is stored."""
        return False

    def may_be_freed(self, storage: torch.UntypedStorage) -> bool:
        """Return whether no copy reads the memory of `storage`."""
        return True

    def before_free(self, storage: torch.UntypedStorage) -> None:
        """Let what reuses the memory of `storage` come behind the copies that read it. The host does not wait."""

    def last_copy(self, slot: Slot) -> Event | None:
        """Return the end of the last copy between a device and `slot`, which may be reused behind it."""
        return None

    def to_host(
        self, slot: Slot | None, storage: torch.UntypedStorage, dtype: torch.dtype, *geometry: tuple[int, ...]
    ) -> HostCopy:
        """Return the bytes of `storage`, or those of `slot` where it is empty, in host memory.

        Args:
            geometry: shape and strides of the tensor.
        """
        return HostCopy(_shown(storage, dtype, *geometry))

    def store_host(self, slot: Slot, copy: HostCopy) -> StateTransfer:
        """Store bytes that `to_host` gave, and that were changed since."""
        return self.store(slot, copy.tensor.untyped_storage())

    def from_host(self, copy: HostCopy, storage: torch.UntypedStorage) -> Callable[[], None]:
        """Give a storage the bytes that `to_host` gave of it, and that were changed since. Returns what lets the current stream
        wait for them: who uses them calls it first."""
        return nothing

    def of_host(self) -> StateTransfers:
        """Return the transfers of host memory through the same tiers."""
        return StateTransfers(self._store, verify=self._verify)


def _shown(storage: torch.UntypedStorage, dtype: torch.dtype, *geometry: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, *geometry)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _HostBuffer:
    """Host memory that a transfer passes through: pinned where the arena has room."""

    def __init__(self, lease: Lease | None, nbytes: int) -> None:
        self._lease = lease
        self.tensor = (
            torch.frombuffer(lease.view(), dtype=torch.uint8)
            if lease is not None
            else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        )

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()


class Staged(StateTransfers):
    """The same between slots and device memory, through an arena of host memory.

    Note: [Order on the device]
        The current stream waits for stores, so that what is written to the memory next comes behind them, and for loads when
        `wait` is called. It does not wait for copies to the CPU's steps, whose source is freed next (`before_free`), as late as
        there is room. Drives work meanwhile.

    Note: [Slots in pinned memory]
        Where the host tier is pinned, its slots need no buffer and no thread: the device copies to and from them itself, a load
        as soon as it begins, and a chunk is stepped on the CPU in its slots. The host waits for no copy but for what it reads
        itself: streams keep the order, of two copies with one slot too, by the event of the last one.

    Args:
        store: the tiers.
        device: of the storages.
        arena: pinned host memory.
        verify: compare a checksum of all bytes that a thread moves.
    """

    frees_at_once = True

    def __init__(self, store: SpillStore, device: Device, arena: Arena, *, verify: bool) -> None:
        super().__init__(store, verify=verify)
        self._device = device
        self._arena = arena
        self._busy: deque[tuple[Operation | None, Event | None, _HostBuffer]] = deque()
        self._copies: dict[int, Event | None] = {}  # the last one with a slot, by its address
        self._sources: dict[int, Event] = {}  # the end of the copy that reads a storage, by the storage

    def steps_in(self, slot: Slot) -> bool:
        return slot.pinned

    def may_be_freed(self, storage: torch.UntypedStorage) -> bool:
        copied = self._sources.get(storage._cdata)
        return copied is None or copied.query()

    def before_free(self, storage: torch.UntypedStorage) -> None:
        copied = self._sources.pop(storage._cdata, None)
        if copied is not None:
            self._device.wait(copied)
        if storage.nbytes():  # its memory may be another stream's
            self._device.record_use(_bytes_of(storage))

    def last_copy(self, slot: Slot) -> Event | None:
        return self._copies.get(slot.address)

    def make_room(self, nbytes: int) -> None:
        self._reclaim(block=False)
        while self._busy and not self._has_room(nbytes):
            self._reclaim(block=True)

    def _has_room(self, nbytes: int) -> bool:
        with signals_deferred():
            lease = self._arena.acquire(nbytes)
            if lease is not None:
                lease.release()
        return lease is not None

    def load(self, slot: Slot, storage: torch.UntypedStorage) -> StateTransfer:
        if self.steps_in(slot):
            storage.resize_(slot.nbytes)
            copied = self._queue_copy_in(slot.address, storage, self.last_copy(slot))
            self._note_copy(slot, copied, into=False)
            return _OrderedLoad(self._device, copied, storage)
        buffer = _HostBuffer(self._arena.acquire(slot.nbytes), slot.nbytes)
        try:
            operation = self._store.read(slot, buffer.tensor.data_ptr(), memory=buffer)
        except Exception:
            buffer.release()
            raise
        return _StagedLoad(self, operation, storage, buffer, slot.nbytes)

    def store(self, slot: Slot, storage: torch.UntypedStorage) -> StateTransfer:
        if self.steps_in(slot):
            self._copy_out(slot, storage)
            self.before_free(storage)
            return _OrderedStore(storage)
        buffer = _HostBuffer(self._arena.acquire(slot.nbytes), slot.nbytes)
        copied = self._device.copy_to_host(storage.data_ptr(), buffer.tensor.data_ptr(), storage.nbytes())
        if copied is not None:
            self._device.wait(copied)
        operation = None
        try:
            operation = self._store.write(
                slot,
                buffer.tensor.data_ptr(),
                after_event=self._device.event_handle(copied),
                verify=self._verify,
            )
        finally:
            self._busy.append((operation, copied, buffer))
        return StateTransfer(operation, storage)

    def store_where(self, flag: torch.Tensor, slot: Slot, storage: torch.UntypedStorage) -> bool:
        values = torch.empty(0, dtype=torch.int16, device=storage.device).set_(storage)
        if not (self.steps_in(slot) and self._writes_pinned and kernels.usable("auto", values)):
            return False
        if values.numel() >= 1 << 31:  # a kernel counts no further
            return False
        kernels.copy_where_set(flag.view(1).to(torch.uint8), values, values, slot.address)
        self._note_copy(slot, self._device.record(self._device.current_stream()), into=True)
        return True

    @cached_property
    def _writes_pinned(self) -> bool:
        return self._device.writes_pinned()

    def _copy_out(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        self._note_copy(slot, self._read(storage, slot.address), into=True)

    def _read(self, storage: torch.UntypedStorage, address: int) -> Event | None:
        """Queue the copy of `storage` to `address`: see `before_free`."""
        copied = self._device.copy_to_host(storage.data_ptr(), address, storage.nbytes())
        if copied is not None:
            self._sources[storage._cdata] = copied
        return copied

    def _note_copy(self, slot: Slot, copied: Event | None, *, into: bool) -> None:
        self._copies[slot.address] = copied
        (self._store.copied_in if into else self._store.copied_out)(slot.nbytes)

    def to_host(
        self, slot: Slot | None, storage: torch.UntypedStorage, dtype: torch.dtype, *geometry: tuple[int, ...]
    ) -> HostCopy:
        if slot is not None and self.steps_in(slot):
            if storage.nbytes():
                self._copy_out(slot, storage)
            shown = torch.frombuffer(slot.view(), dtype=torch.uint8).untyped_storage()
            last = self.last_copy(slot)
            block = nothing if last is None else partial(self._device.block, last)
            return HostCopy(_shown(shown, dtype, *geometry), block, slot=slot)
        nbytes = storage.nbytes() if slot is None else slot.nbytes
        buffer = _HostBuffer(self._arena.acquire(nbytes), nbytes)
        address = buffer.tensor.data_ptr()
        wait: Callable[[], object] = nothing
        if storage.nbytes():
            copied = self._read(storage, address)
            if copied is not None:
                wait = partial(self._device.block, copied)
        else:
            assert slot is not None
            wait = self._store.read(slot, address, memory=buffer).wait
        return HostCopy(_shown(buffer.tensor.untyped_storage(), dtype, *geometry), wait, buffer)

    def store_host(self, slot: Slot, copy: HostCopy) -> StateTransfer:
        assert copy.buffer is not None
        buffer, copy.buffer = copy.buffer, None
        operation = self._store.write(slot, buffer.tensor.data_ptr(), verify=self._verify)
        self._busy.append((operation, None, buffer))
        return StateTransfer(operation, copy.tensor.untyped_storage())

    def from_host(self, copy: HostCopy, storage: torch.UntypedStorage) -> Callable[[], None]:
        behind = self._sources.pop(storage._cdata, None)
        copied = self._queue_copy_in(copy.tensor.data_ptr(), storage, behind)
        if copy.slot is not None:
            self._note_copy(copy.slot, copied, into=False)
        if copy.buffer is not None:
            self._busy.append((None, copied, copy.buffer))
            copy.buffer = None
        return nothing if copied is None else partial(self._device.wait, copied)

    def copy_in(self, buffer: _HostBuffer, storage: torch.UntypedStorage) -> None:
        """Give the storage the bytes of `buffer` for what the current stream is given next; `buffer` is released after that."""
        copied = self._queue_copy_in(buffer.tensor.data_ptr(), storage)
        if copied is not None:
            self._device.wait(copied)
        self._busy.append((None, copied, buffer))

    def _queue_copy_in(
        self, address: int, storage: torch.UntypedStorage, behind: Event | None = None
    ) -> Event | None:
        """Queue the copy from `address`, behind `behind` and what the current stream was given before."""
        ready = self._device.record(self._device.current_stream())
        after = [event for event in (ready, behind) if event is not None]
        return self._device.copy_to_device(address, storage.data_ptr(), storage.nbytes(), after)

    def close(self) -> None:
        """Give the buffers back, so that the arena can be closed, once their transfers have ended. The store is closed. Those of
        a transfer that never ends (behind a collective whose peer is gone) are kept."""
        patience = Patience(UNPIN_TIMEOUT, self._device.progress)
        hung = False
        while self._busy:
            operation, event, buffer = self._busy[0]
            ended = operation is None or operation.done()
            if ended and event is not None and not event.query():
                hung = hung or not patience.wait(partial(self._device.block, event))
                ended = not hung
            with signals_deferred():
                self._busy.popleft()
                if ended:
                    buffer.release()

    def _reclaim(self, *, block: bool) -> None:
        """Release buffers whose transfers have ended; with `block`, wait for the oldest. The waiter gets the failure."""
        while self._busy:
            operation, event, buffer = self._busy[0]
            if block:
                if operation is not None:
                    failure_of(operation)  # `StoredTensor` raises it, with the name of the tensor
                if event is not None:
                    self._device.block(event)
            elif (operation is not None and not operation.done()) or (
                event is not None and not event.query()
            ):
                return
            with signals_deferred():
                self._busy.popleft()
                buffer.release()
            block = False


class _OrderedStore(StateTransfer):
    """A copy from a device, which streams keep in order: there is nothing that the host waits for, and the device reports what
    fails."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class _OrderedLoad(_OrderedStore):
    """A copy to a device, for which the stream waits that reads it."""

    def __init__(self, device: Device, copied: Event | None, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)
        self._device, self._copied = device, copied
        self._stream = device.current_stream()

    def wait(self) -> None:
        if self._copied is None:
            return
        self._device.wait(self._copied)
        if self._device.current_stream() != self._stream:  # whose memory it is
            self._device.record_use(_bytes_of(self._storage))


class _StagedLoad(StateTransfer):
    """The storage is empty until it gets its bytes: who reads a weight before it is loaded gets an error, and not what was in
    the memory."""

    def __init__(
        self,
        transfers: Staged,
        operation: Operation,
        storage: torch.UntypedStorage,
        buffer: _HostBuffer,
        nbytes: int,
    ) -> None:
        super().__init__(operation, storage)
        self._transfers = transfers
        self._buffer: _HostBuffer | None = buffer
        self._nbytes = nbytes

    def wait(self) -> None:
        if self._buffer is None:
            return
        self._operation.wait()
        with signals_deferred():
            self._storage.resize_(self._nbytes)
            buffer, self._buffer = self._buffer, None
            self._transfers.copy_in(buffer, self._storage)

    def discard(self) -> None:
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None
