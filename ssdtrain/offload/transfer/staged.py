"""Device tensors on their way to a tier and back: a copy on a side stream into pinned host memory, then the I/O pool.

The tensor goes as soon as the copy has left the device. On the CPU this way works too (its events are no-ops), which is how it
is tested without a GPU.
"""

from __future__ import annotations

from collections import deque

import torch

from ssdtrain.device import Device, Event
from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.offload.tensors.region import Region, after_close
from ssdtrain.offload.transfer.buffers import Buffers
from ssdtrain.offload.transfer.coding import Coding
from ssdtrain.offload.transfer.state import Arrival, PayloadCheck, Read, Write
from ssdtrain.offload.transfer.targets import LoadTargets, Target
from ssdtrain.offload.transfer.transfer import Transfer, address_of
from ssdtrain.storage import Lease, Operation, Slot, SpillStore

_Passing = tuple[Event, Lease | None, torch.UntypedStorage | torch.Tensor | None]
"""A copy under way: its event, the staging buffer that it alone uses, if any, and what else it needs alive."""

_TO_DEVICE, _TO_HOST, _BUFFERLESS_TO_DEVICE, _BUFFERLESS_TO_HOST = range(4)


class StagedTransfer(Transfer):
    """Device tensors, through pinned buffers of the arena.

    Note: [Emptying before the write has ended]
    The copy off the device is ordered on the store stream. Once the stream that allocated the tensor waits for its event, the
    tensor may go, whether or not the copy has begun: what reuses its memory comes later on that stream. From then on the staging
    buffer is the only place that holds the bytes. Nothing depends on when the host notices the end of a copy.

    Note: [Buffers in passing]
    A staging buffer whose bytes are on their way to the device belongs to the copy until its event has passed. The host never
    waits for one, unless it needs a buffer and all are in use: `returning`.

    Note: [Pinned host tier]
    Where the host tier is pinned, a slot in it is its own staging buffer: copies go there and come from there, and no thread
    of the host touches a byte or waits for one. Such a region is STORED when its tensor leaves, and LOADED when the copy back is
    queued: the streams keep the order. The slot is freed with its last copy (`SpillStore.free`), so that its memory is not given
    to another region before that has passed. Of a payload, which may have overflowed, an operation stands for each
    copy (`DeviceCopy`), as for those of the I/O pool.
    """

    copies = True
    targets: LoadTargets
    _reads_into_targets = False
    """A drive does, as soon as a load begins, so that its memory cannot be waited for."""

    def __init__(
        self,
        store: SpillStore,
        buffers: Buffers,
        meter: ActivationMeter,
        coding: Coding,
        device: Device,
        verify: bool,
    ) -> None:
        super().__init__(store, buffers, meter, coding, device, verify)
        self.targets = LoadTargets(device, meter, waits=self._reads_into_targets)
        # Copies by direction, those without a staging buffer apart. See Note: [Buffers in passing].
        self._passing: tuple[deque[_Passing], ...] = (deque(), deque(), deque(), deque())
        # The ends of the last copies to the pinned tier, and from it.
        self._last_out: Event | None = None
        self._last_back: Event | None = None

    @property
    def unstaged(self) -> bool:
        return self.store.pins_all

    @property
    def largest(self) -> int | None:
        return None if self.unstaged else self.buffers.capacity

    def check_payload(self, region: Region) -> PayloadCheck | None:
        flag = self.coding.flag(region)
        event = None
        if flag is not None:
            on_host = torch.empty_like(flag, device="cpu", pin_memory=True)
            on_host.copy_(flag, non_blocking=True)
            event = self.device.record(self.device.current_stream())
        if flag is None or event is None:
            self._leave_to_payload(region)
            return None
        return PayloadCheck(on_host, event)

    def begin_store(self, region: Region, *, defer: bool) -> Write | None:
        slot = region.transfer.slot
        assert slot is not None
        if slot.pinned:
            event = self._copy_out(region, slot.address)
            operation = self._copied(slot, event, region.transfer.stored_bytes, into=True)
            return Write(operation, 0, None, event)
        lease = self.buffers.acquire(region.transfer.staged_bytes)
        if lease is None:
            return None
        event = self._copy_out(region, lease.address)
        # Never deferred: the pool's workers wait for the device anyway.
        return Write(self._write(region, lease, event), 0, lease, event)

    def copy_out(self, address: int, slot: Slot) -> Event | None:
        nbytes = slot.nbytes
        event = self._last_out = self.device.copy_to_host(address, slot.address, nbytes)
        self.store.copied_in(nbytes)
        return event

    def _copy_out(self, region: Region, host: int) -> Event | None:
        """Queue the copy of the region, or of its payload, to the address `host` in pinned memory."""
        transfer = region.transfer
        nbytes = transfer.stored_bytes
        if transfer.spare_bytes:
            nbytes = self.coding.keep_values(region, host)
        if transfer.payload is not None:
            self._leave_to_payload(region)
        return self.device.copy_to_host(address_of(region), host, nbytes)

    def _leave_to_payload(self, region: Region) -> None:
        """The tensor is released next: what reuses its memory comes after the encoding."""
        current = self.device.current_stream()
        if region.stream is not None and region.stream != current:
            encoded = self.device.record(current)
            if encoded is not None:
                self.device.wait(encoded, region.stream)
            region.stream = current  # which has the memory of the payload, and gets it back when that departs

    def _copied(self, slot: Slot, event: Event | None, nbytes: int, *, into: bool) -> Operation:
        """Return the copy of a payload to a pinned slot or from it: the slot is not used again before it has passed."""
        if event is not None:  # `close` waits for it: the tier is unmapped then
            self._passing[_BUFFERLESS_TO_HOST if into else _BUFFERLESS_TO_DEVICE].append((event, None, None))
        copy = DeviceCopy(self.device, event, nbytes)
        slot.record(copy, 0 if into else None)
        (self.store.copied_in if into else self.store.copied_out)(nbytes)
        return copy

    def _write(self, region: Region, lease: Lease, event: Event | None) -> Operation:
        handle = self.device.event_handle(event)
        transfer = region.transfer
        assert transfer.slot is not None
        address = lease.address + transfer.raw_from
        return self.store.write(transfer.slot, address, after_event=handle, verify=self._verify)

    def overflowed(self, region: Region) -> bool:
        host = None if self.closed else self._staged(region)  # after the end nothing comes back from a tier
        return host is not None and self.coding.has_overflowed(region, host)

    def depart(self, region: Region) -> None:
        event = region.transfer.event
        assert event is not None
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
            self._passing[_TO_DEVICE].append((event, lease, None))
        else:
            payload = region.transfer.payload
            source = payload if payload is not None else region.tensor.untyped_storage()
            self._passing[_TO_HOST].append((event, lease, source))

    def rewrite(self, region: Region) -> Operation:
        lease = region.transfer.lease
        assert lease is not None
        return self._write(region, lease, region.transfer.event)

    def recall(self, region: Region) -> Arrival | None:
        transfer = region.transfer
        if transfer.payload is not None:
            decoded = self._decode(region, transfer.payload)
            decoded.payload = transfer.payload
            return decoded
        host = None if region.in_tensor else self._staged(region)
        if host is None:
            return None
        nbytes = transfer.stored_bytes
        if transfer.spare_bytes and not self._holds(region, host):
            nbytes = transfer.staged_bytes
        arrival = self._copy_in(region, host, nbytes, transfer.event)
        return arrival if transfer.codec is None else self._decode_arrived(region, arrival)

    def _holds(self, region: Region, host: int) -> bool:
        """Whether it is known already that the payload at `host`, which is copied there, has not overflowed."""
        event = region.transfer.event
        return (event is None or event.query()) and not self.coding.has_overflowed(region, host)

    def _decode_arrived(self, region: Region, arrival: Arrival) -> Arrival:
        """Return the values of the payload that has departed, which is on the way back as `arrival`."""
        payload, target = arrival.loaded, arrival.target
        assert payload is not None and target is not None
        if arrival.event is not None:
            self.device.wait(arrival.event)
        target.streams.append(self.device.current_stream())
        decoded = self._decode(region, payload)
        decoded.target, decoded.event = target, arrival.event
        return decoded

    def _staged(self, region: Region) -> int | None:
        """Address of the pinned memory where a store has put the bytes; None: there is none now."""
        transfer = region.transfer
        if transfer.lease is not None:
            return transfer.lease.address + transfer.raw_from
        if transfer.slot is not None and transfer.slot.pinned:
            if self.closed or self.store.closed:  # which unmaps the tier
                raise after_close()
            return transfer.slot.address + transfer.raw_from
        return None

    def copy_back(self, region: Region) -> Arrival:
        transfer = region.transfer
        if self.closed or self.store.closed:  # which unmaps the tier
            raise after_close()
        assert transfer.slot is not None
        nbytes = transfer.stored_bytes
        arrival = self._copy_in(region, transfer.slot.address, nbytes, transfer.event)
        self.store.copied_out(nbytes)
        self._last_back = arrival.event
        return arrival

    def begin_load(self, region: Region, *, on_demand: bool, allow_unpooled: bool = False) -> Read | None:
        transfer = region.transfer
        assert transfer.slot is not None
        if transfer.slot.pinned:
            return Read(DeviceCopy(self.device, None, transfer.stored_bytes))  # there is nothing to read
        lease = self.buffers.acquire(transfer.stored_bytes)
        if lease is not None:
            operation = self.store.read(transfer.slot, lease.address, defer=not on_demand)
            return Read(operation, lease)
        if not allow_unpooled:
            return None
        buffer = torch.empty(transfer.stored_bytes, dtype=torch.uint8, device="cpu")
        return Read(self.store.read(transfer.slot, buffer.data_ptr()), None, buffer)

    def advance_load(self, region: Region) -> Arrival:
        lease, unpooled = region.transfer.lease, region.transfer.loaded
        if unpooled is not None:
            host: int | None = unpooled.data_ptr()
        else:
            host = self._staged(region) if lease is None else lease.address
        assert host is not None
        # It may find no memory: then the region is as before, and this may be tried again.
        arrival = self._copy_in(region, host, region.transfer.stored_bytes)
        if unpooled is not None and arrival.event is not None:
            self._passing[_BUFFERLESS_TO_DEVICE].append((arrival.event, None, unpooled))
        self._return(lease, arrival.event, region.transfer.event, region)
        if region.transfer.codec is not None:
            arrival.loaded, arrival.payload = None, arrival.loaded
        return arrival

    def _copy_in(self, region: Region, host: int, nbytes: int, after: Event | None = None) -> Arrival:
        """Queue the copy of `nbytes` at the address `host`, those that are stored, to the device, behind `after`."""
        transfer = region.transfer
        target = transfer.target
        if target is None or target.tensor is None:  # none yet, or that of an earlier load
            target = self._reserve(region, nbytes)
        tensor, memory = self.targets.take(target), target.memory
        awaited = memory.awaited
        if after is not None:
            awaited.append(after)
        event = self.device.copy_to_device(host, target.address, nbytes, awaited)
        memory.awaited = []  # all copies to the device are queued on one stream, the next one behind this
        if transfer.rest is not None:
            event = self._put_back(region, tensor) or event
        if not transfer.pinned and (slot := transfer.slot) is not None and slot.pinned:
            self._copied(slot, event, nbytes, into=False)
        return Arrival(tensor, None, target, event)

    def _put_back(self, region: Region, whole: torch.Tensor) -> Event | None:
        """Queue the copy of the part that stayed, if the region left in part. None: it did not, or the copy is over."""
        rest = region.transfer.rest
        if rest is None:
            return None
        event = self.rests.put_back(region, whole)
        if event is not None:
            self._passing[_BUFFERLESS_TO_DEVICE].append((event, None, rest))
        return event

    def reserve_target(self, region: Region) -> Target:
        return self._reserve(region, region.transfer.stored_bytes)

    def _reserve(self, region: Region, nbytes: int) -> Target:
        """Return memory for `nbytes` that are stored, and for the part that stayed."""
        transfer = region.transfer
        if transfer.rest is not None:
            return self.targets.reserve(nbytes + transfer.rest.numel(), transfer.lead)
        if transfer.codec is not None:  # what arrives is encoded
            return self.targets.reserve(nbytes)
        return self.targets.reserve(nbytes, transfer.lead, region.form)

    def end_load(self, region: Region) -> Arrival | None:
        transfer = region.transfer
        stream = self.device.current_stream()
        if transfer.load_event is not None:
            self.device.wait(transfer.load_event, stream)
        if transfer.target is not None and stream not in transfer.target.streams:
            transfer.target.streams.append(stream)
        if transfer.decoding is not None and transfer.loaded is not None:
            self.device.wait(transfer.decoding, stream)
            self.device.record_use(transfer.loaded)  # of the stream that decoded it
        if transfer.payload is None or transfer.loaded is not None:
            return None
        return self._decode(region, transfer.payload)

    def _decode(self, region: Region, payload: torch.Tensor) -> Arrival:
        """Return the values of a payload, decoded on the current stream; others wait for the event."""
        if payload is region.transfer.payload and region.transfer.target is None:
            self.device.record_use(payload)
        values = self.values_of(region, payload)
        return Arrival(values, None, None, None, self.device.record(self.device.current_stream()))

    def poll(self) -> None:
        self.targets.note_deaths()
        if any(self._passing):
            for passing in self._passing:
                while passing and passing[0][0].query():
                    lease = passing.popleft()[1]
                    if lease is not None:
                        lease.release()

    def passing(self) -> Event | None:
        for event in (self._last_out, self._last_back):
            if event is not None and not event.query():
                return event
        return next((copies[0][0] for copies in self._passing if copies), None)

    def returning(self) -> Event | None:
        with_buffers = self._passing[: _TO_HOST + 1]
        return next((copies[0][0] for copies in with_buffers if copies), None)


class DeviceCopy:
    """Over when its event has passed; an `ssdtrain.storage.Operation`. It was queued on a stream: it cannot be cancelled, and the
    device reports what fails.

    Args:
        device: whose stream copies.
        event: the end of the copy; None: it is over.
        nbytes: size.
    """

    began = seconds = 0.0  # not measured
    checksum = digest = 0

    def __init__(self, device: Device, event: Event | None, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        self._event = event

    def done(self) -> bool:
        event = self._event
        if event is None:
            return True
        if event.query():
            self._event = None
            return True
        return False

    def begun(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        event = self._event
        return event is None or self._device.block(event, timeout)

    def cancel(self) -> bool:
        return False

    def failed(self) -> None:
        return None
