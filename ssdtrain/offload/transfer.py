"""How a region's bytes get from a tensor to a tier and back.

Two ways. `DirectTransfer` lets the I/O pool read and write CPU tensors where they are: no copy in user space, and the tensor
stays until its write has ended. `StagedTransfer` is for device memory: a copy on a side stream into a pinned buffer, then
the pool; the tensor goes as soon as the copy has left the device. On the CPU the staged way works too (its events are
no-ops), which is how it is tested without a GPU.

Both are called with the engine's lock held and never wait. They read the state of a region's transfer and change nothing of
it: what they began or made is returned to the mover.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ssdtrain.device import Device, Event
from ssdtrain.offload.buffers import Buffers
from ssdtrain.offload.coding import Coding
from ssdtrain.offload.region import Region
from ssdtrain.offload.targets import LoadTargets, Target
from ssdtrain.offload.transfer_state import Arrival, Read, Write
from ssdtrain.storage import ALIGNMENT, Lease, Operation, SpillStore

__all__ = ["DirectTransfer", "StagedTransfer", "Transfer"]


class Transfer(Protocol):
    """The moves of one region; the mover decides when, and keeps the states."""

    buffers: Buffers
    copies: bool
    """Tensors are copied to a buffer first, so that one may be emptied (`depart`) before its write has ended."""

    def encode(self, region: Region) -> torch.Tensor | None:
        """The payload of a region that has a codec; None: the codec does not fit its bytes."""

    def begin_store(self, region: Region, *, defer: bool) -> Write | None:
        """Queue the write of the region, or of its payload, to its slot. None: there is no buffer for it now.

        Args:
            defer: nothing waits for it, see `SpillStore.write`.
        """

    def depart(self, region: Region) -> None:
        """Let the stream of a region that is being stored wait for its copy: then its tensor may be emptied."""

    def give_back(self, region: Region) -> None:
        """Return the staging buffer of the region once no copy uses it."""

    def rewrite(self, region: Region) -> Operation:
        """Write again, to a new slot, what a failed write left in memory."""

    def recall(self, region: Region) -> Arrival | None:
        """Bring back the bytes of a region being stored from its payload or its buffer. None: they are still in the tensor."""

    def begin_load(self, region: Region, *, on_demand: bool, allow_unpooled: bool = False) -> Read | None:
        """Queue the read of the region. None: the arena is full.

        Args:
            on_demand: backward waits for it; else it may begin with others.
            allow_unpooled: allocate outside of the arena where that is full.
        """

    def advance_load(self, region: Region) -> Arrival:
        """The read has ended: begin what follows it."""

    def end_load(self, region: Region) -> Arrival | None:
        """Order what follows on the current stream after the load. Returns the values of what came back encoded."""

    def reserve_target(self, nbytes: int) -> Target:
        """The device memory for a region that is about to come back."""

    def poll(self) -> None:
        """Return the buffers whose copies have passed."""

    def passing(self) -> Event | None:
        """Of the buffer that comes back next; None: none is in use by a copy alone."""


class _Passing(NamedTuple):
    """A staging buffer that a copy alone uses, until its event has passed, and what else it needs alive."""

    event: Event
    lease: Lease | None
    source: torch.UntypedStorage | torch.Tensor | None


_TO_HOST, _TO_DEVICE = range(2)


def _bytes_of(lease: Lease) -> torch.Tensor:
    """The lease as a uint8 tensor that owns it: the buffer goes back when the storage dies."""
    return torch.frombuffer(lease.owning_view(), dtype=torch.uint8)


class _Encoding:
    """The payloads of both ways, seen by the meter."""

    def __init__(self, coding: Coding, seen: Callable[[torch.UntypedStorage], None]) -> None:
        self._coding = coding
        self._seen = seen

    def encode(self, region: Region) -> torch.Tensor | None:
        if region.transfer.payload is not None:
            return region.transfer.payload
        if not self._coding.fits(region):
            return None
        payload = self._coding.encode(region)
        self._seen(payload.untyped_storage())
        return payload

    def decode(self, region: Region) -> torch.Tensor:
        loaded = self._coding.decode(region)
        self._seen(loaded.untyped_storage())
        return loaded


class DirectTransfer:
    """CPU tensors, read and written in place by the I/O pool."""

    copies = False

    def __init__(
        self,
        store: SpillStore,
        buffers: Buffers,
        seen: Callable[[torch.UntypedStorage], None],
        coding: Coding,
        device: Device,
    ) -> None:
        self.store = store
        self.buffers = buffers
        self._seen = seen
        self._encoding = _Encoding(coding, seen)

    def encode(self, region: Region) -> torch.Tensor | None:
        return self._encoding.encode(region)

    def begin_store(self, region: Region, *, defer: bool) -> Write | None:
        slot = region.transfer.slot
        assert slot is not None
        address = _address(region)
        return Write(
            self.store.write(slot, address, defer=defer, verify=region.transfer.verify), address % ALIGNMENT
        )

    def depart(self, region: Region) -> None:
        raise AssertionError("the pool reads the tensor itself, or it was emptied when it was encoded")

    def give_back(self, region: Region) -> None:
        return None

    def rewrite(self, region: Region) -> Operation:
        slot, operation = region.transfer.slot, region.transfer.operation
        assert slot is not None and operation is not None
        return self.store.write(
            slot, _address(region), checksum=operation.checksum, verify=region.transfer.verify
        )

    def recall(self, region: Region) -> Arrival | None:
        payload = region.transfer.payload
        return None if payload is None else Arrival(self._encoding.decode(region), payload)

    def begin_load(self, region: Region, *, on_demand: bool, allow_unpooled: bool = False) -> Read | None:
        transfer = region.transfer
        assert transfer.slot is not None
        lease = self.buffers.acquire(transfer.stored_bytes, transfer.page_offset)
        if lease is not None:
            buffer = _bytes_of(lease)
        elif allow_unpooled:
            buffer = torch.empty(transfer.stored_bytes, dtype=torch.uint8)
            self._seen(buffer.untyped_storage())
        else:
            return None
        operation = self.store.read(transfer.slot, buffer.data_ptr(), defer=not on_demand)
        if transfer.codec is None:
            return Read(operation, loaded=buffer)
        return Read(operation, payload=buffer)

    def advance_load(self, region: Region) -> Arrival:
        return Arrival(region.transfer.loaded, region.transfer.payload)

    def end_load(self, region: Region) -> Arrival | None:
        if region.transfer.payload is None or region.transfer.loaded is not None:
            return None
        return Arrival(self._encoding.decode(region))

    def reserve_target(self, nbytes: int) -> Target:
        raise AssertionError("what the pool reads lies in the arena")

    def poll(self) -> None:
        return None

    def passing(self) -> None:
        return None


def _address(region: Region) -> int:
    """Of what is written: the region, or its payload."""
    payload = region.transfer.payload
    return region.address if payload is None else payload.data_ptr()


class StagedTransfer:
    """Device tensors, through pinned buffers of the arena.

    Note: [Emptying before the write has ended]
    The copy off the device is ordered on the store stream. Once the stream that allocated the tensor waits for its event, the
    tensor may go, whether or not the copy has begun: what reuses its memory comes later on that stream. From then on the staging
    buffer is the only place that holds the bytes. Nothing depends on when the host notices the end of a copy.

    Note: [Buffers in passing]
    A staging buffer whose bytes are on their way to the device belongs to the copy until its event has passed. The host never
    waits for one, unless it needs a buffer and all are in use: `passing`.
    """

    copies = True

    def __init__(
        self,
        store: SpillStore,
        buffers: Buffers,
        seen: Callable[[torch.UntypedStorage], None],
        coding: Coding,
        device: Device,
    ) -> None:
        self.store = store
        self._seen = seen
        self._encoding = _Encoding(coding, seen)
        self.buffers = buffers
        self.device = device
        self.targets = LoadTargets(device)
        # Buffers that a copy alone uses, by direction, each in the order of the copies. See Note: [Buffers in passing].
        self._passing: tuple[deque[_Passing], deque[_Passing]] = (deque(), deque())

    def encode(self, region: Region) -> torch.Tensor | None:
        payload = self._encoding.encode(region)
        # The tensor is released next: what reuses its memory comes after the encoding.
        current = self.device.current_stream()
        if payload is not None and region.stream is not None and region.stream != current:
            encoded = self.device.record(current)
            if encoded is not None:
                self.device.wait(encoded, region.stream)
        return payload

    def begin_store(self, region: Region, *, defer: bool) -> Write | None:
        lease = self.buffers.acquire(region.transfer.stored_bytes)
        if lease is None:
            return None
        source = region.transfer.payload
        if source is None:
            source = torch.empty(0, dtype=torch.uint8, device=region.tensor.device)
            source.set_(region.tensor.untyped_storage(), region.start, (region.nbytes,), (1,))
        event = self.device.copy_to_host(source, torch.frombuffer(lease.view(), dtype=torch.uint8))
        # Never deferred: the pool's workers wait for the device anyway.
        return Write(self._write(region, lease, event), lease=lease, event=event)

    def _write(self, region: Region, lease: Lease, event: Event | None) -> Operation:
        handle = self.device.event_handle(event)
        transfer = region.transfer
        assert transfer.slot is not None
        return self.store.write(transfer.slot, lease.address, after_event=handle, verify=transfer.verify)

    def depart(self, region: Region) -> None:
        event = region.transfer.event
        if event is not None and not event.query():
            self.device.wait(event, region.stream)
            current = self.device.current_stream()
            if current != region.stream:
                self.device.wait(event, current)

    def give_back(self, region: Region) -> None:
        transfer = region.transfer
        self._return(transfer.lease, transfer.load_event, transfer.event, region)

    def _return(
        self, lease: Lease | None, load_event: Event | None, store_event: Event | None, region: Region
    ) -> None:
        """Return a staging buffer when the copy that uses it has passed, that of a cancelled store or one back to the device.

        A copy off the device also reads memory that its owner may release next.
        """
        if lease is None:
            return
        event = load_event or store_event
        if event is None or event.query():
            lease.release()
        elif load_event is not None:
            self._passing[_TO_DEVICE].append(_Passing(event, lease, None))
        else:
            self._passing[_TO_HOST].append(_Passing(event, lease, region.tensor.untyped_storage()))

    def rewrite(self, region: Region) -> Operation:
        lease = region.transfer.lease
        assert lease is not None
        return self._write(region, lease, region.transfer.event)

    def recall(self, region: Region) -> Arrival | None:
        transfer = region.transfer
        if transfer.payload is not None:
            return self._decode(region)._replace(payload=transfer.payload)
        if transfer.lease is None or region.in_tensor:
            return None
        host = torch.frombuffer(transfer.lease.view(), dtype=torch.uint8)
        return self._copy_in(region, host, transfer.event)

    def begin_load(self, region: Region, *, on_demand: bool, allow_unpooled: bool = False) -> Read | None:
        transfer = region.transfer
        assert transfer.slot is not None
        lease = self.buffers.acquire(transfer.stored_bytes)
        if lease is not None:
            operation = self.store.read(transfer.slot, lease.address, defer=not on_demand)
            return Read(operation, lease)
        if not allow_unpooled:
            return None
        buffer = torch.empty(transfer.stored_bytes, dtype=torch.uint8)
        return Read(self.store.read(transfer.slot, buffer.data_ptr()), loaded=buffer)

    def advance_load(self, region: Region) -> Arrival:
        lease = region.transfer.lease
        if lease is not None:
            host = torch.frombuffer(lease.view(), dtype=torch.uint8)
        else:
            assert region.transfer.loaded is not None
            host = region.transfer.loaded
        # It may find no memory: then the region is as before, and this may be tried again.
        arrival = self._copy_in(region, host)
        if lease is None and arrival.event is not None:
            self._passing[_TO_DEVICE].append(_Passing(arrival.event, None, host))
        self._return(lease, arrival.event, region.transfer.event, region)
        if region.transfer.codec is None:
            return arrival
        return arrival._replace(loaded=None, payload=arrival.loaded)

    def _copy_in(self, region: Region, host: torch.Tensor, after: Event | None = None) -> Arrival:
        """Queue the copy of `host` to the device, behind `after`."""
        target = region.transfer.target
        if target is None or target.tensor is None:  # none yet, or that of an earlier load
            target = self.reserve_target(host.numel())
        tensor = self.targets.take(target)
        awaited = target.awaited if after is None else [*target.awaited, after]
        return Arrival(tensor, None, target, self.device.copy_to_device(host, tensor, awaited))

    def reserve_target(self, nbytes: int) -> Target:
        target = self.targets.reserve(nbytes)
        assert target.tensor is not None
        self._seen(target.tensor.untyped_storage())
        return target

    def end_load(self, region: Region) -> Arrival | None:
        transfer = region.transfer
        if transfer.load_event is not None:
            self.device.wait(transfer.load_event)
        if transfer.target is not None:
            self.targets.hand_out(transfer.target)
        if transfer.decoding is not None and transfer.loaded is not None:
            self.device.wait(transfer.decoding)
            self.device.record_use(transfer.loaded)  # of the stream that decoded it
        if transfer.payload is None or transfer.loaded is not None:
            return None
        return self._decode(region)

    def _decode(self, region: Region) -> Arrival:
        """The values of a payload, decoded on the current stream; others wait for the event."""
        payload = region.transfer.payload
        assert payload is not None
        if region.transfer.target is None:
            self.device.record_use(payload)
        values = self._encoding.decode(region)
        return Arrival(values, decoded=self.device.record(self.device.current_stream()))

    def poll(self) -> None:
        self.targets.note_deaths()
        for passing in self._passing:
            while passing and passing[0].event.query():
                lease = passing.popleft().lease
                if lease is not None:
                    lease.release()

    def passing(self) -> Event | None:
        oldest = self._passing[_TO_DEVICE] or self._passing[_TO_HOST]
        return oldest[0].event if oldest else None
