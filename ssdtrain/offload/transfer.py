"""How a region's bytes get from a tensor to a tier and back.

Two ways. `DirectTransfer` lets the I/O pool read and write CPU tensors where they are: no copy in user space, and the tensor
stays until its write has ended. `StagedTransfer` is for device memory: a copy on a side stream into a pinned buffer, then
the pool; the tensor goes as soon as the copy has left the device. On the CPU the staged way works too (its events are
no-ops), which is how it is tested without a GPU.

Both are called with the engine's lock held and never wait.
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
from ssdtrain.offload.targets import LoadTargets
from ssdtrain.storage import ALIGNMENT, Lease, SpillStore

__all__ = ["DirectTransfer", "StagedTransfer", "Transfer"]


class Transfer(Protocol):
    """The moves of one region; the mover decides when, and keeps the states."""

    buffers: Buffers
    copies: bool
    """Tensors are copied to a buffer first, so that one may be emptied (`departed`) before its write has ended."""

    def prepare(self, region: Region) -> None:
        """Encode a region that has a codec, which it loses if that does not fit its bytes; `region.stored_bytes` then go to the
        tier."""

    def begin_store(self, region: Region, *, later: bool) -> bool:
        """Queue the write of `region` to `region.slot`, `later` (see `SpillStore.write`) where nothing waits for it. False:
        there is no buffer for it now."""

    def depart(self, region: Region) -> None:
        """Empty the tensor of a region being stored before the write has ended: what follows on its stream waits for the copy."""

    def end_store(self, region: Region) -> None:
        """The write is over, well or not, and nothing is to be done with its buffer any more."""

    def rewrite(self, region: Region) -> None:
        """Write again, to a new `region.slot`, what a failed write left in memory."""

    def recall(self, region: Region) -> bool:
        """Make the bytes of a region being stored resident again from its buffer. False: they are still in the tensor."""

    def begin_load(self, region: Region, *, asked: bool, outside: bool = False) -> bool:
        """Queue the read of `region`, for later unless backward `asked` for it. False: the arena is full (`outside`: then
        allocate outside of it)."""

    def advance_load(self, region: Region) -> None:
        """The read has ended: begin what follows it."""

    def end_load(self, region: Region) -> None:
        """Order what follows on the current stream after the load."""

    def abandon_load(self, region: Region) -> None:
        """Let go of the buffers of a load that was cancelled, failed or is of no use any more."""

    def reserve_target(self, region: Region, nbytes: int) -> None:
        """Have the device memory for a region that is about to come back."""

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
    return torch.frombuffer(lease.give(), dtype=torch.uint8)


def _encode(coding: Coding, region: Region, seen: Callable[[torch.UntypedStorage], None]) -> None:
    if region.payload is not None:
        return
    if not coding.fits(region):
        region.codec = None
        return
    coding.encode(region)
    assert region.payload is not None
    region.stored_bytes = region.payload.numel()
    seen(region.payload.untyped_storage())


def _decode(coding: Coding, region: Region, seen: Callable[[torch.UntypedStorage], None]) -> None:
    region.loaded = coding.decode(region)
    region.loaded_version = region.loaded._version
    seen(region.loaded.untyped_storage())


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
        self._coding = coding

    def prepare(self, region: Region) -> None:
        _encode(self._coding, region, self._seen)

    def begin_store(self, region: Region, *, later: bool) -> bool:
        assert region.slot is not None
        address = region.address if region.payload is None else region.payload.data_ptr()
        region.lead = address % ALIGNMENT
        region.operation = self.store.write(region.slot, address, later=later)
        return True

    def depart(self, region: Region) -> None:
        raise AssertionError("the pool reads the tensor itself, or it was emptied when it was encoded")

    def end_store(self, region: Region) -> None:
        region.operation = None
        region.payload = None

    def rewrite(self, region: Region) -> None:
        assert region.slot is not None and region.operation is not None
        address = region.address if region.payload is None else region.payload.data_ptr()
        region.operation = self.store.write(region.slot, address, check=region.operation.check)

    def recall(self, region: Region) -> bool:
        if region.payload is None:
            return False
        _decode(self._coding, region, self._seen)
        return True

    def begin_load(self, region: Region, *, asked: bool, outside: bool = False) -> bool:
        assert region.slot is not None
        lease = self.buffers.acquire(region.stored_bytes, region.lead)
        if lease is not None:
            buffer = _bytes_of(lease)
        elif outside:
            buffer = torch.empty(region.stored_bytes, dtype=torch.uint8)
            self._seen(buffer.untyped_storage())
        else:
            return False
        region.operation = self.store.read(region.slot, buffer.data_ptr(), later=not asked)
        if region.codec is None:
            region.loaded = buffer
        else:
            region.payload = buffer
        return True

    def advance_load(self, region: Region) -> None:
        region.operation = None
        if region.loaded is not None:
            region.loaded_version = region.loaded._version

    def end_load(self, region: Region) -> None:
        if region.payload is not None and region.loaded is None:
            _decode(self._coding, region, self._seen)
            region.payload = None

    def abandon_load(self, region: Region) -> None:
        region.operation = None
        region.loaded = None
        region.payload = None

    def reserve_target(self, region: Region, nbytes: int) -> None:
        raise AssertionError("what the pool reads lies in the arena")

    def poll(self) -> None:
        return None

    def passing(self) -> None:
        return None


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
        self._coding = coding
        self.buffers = buffers
        self.device = device
        self.targets = LoadTargets(device)
        # Buffers that a copy alone uses, by direction, each in the order of the copies. See Note: [Buffers in passing].
        self._passing: tuple[deque[_Passing], deque[_Passing]] = (deque(), deque())

    def prepare(self, region: Region) -> None:
        _encode(self._coding, region, self._seen)
        # The tensor is let go of next: what reuses its memory comes after the encoding.
        current = self.device.current_stream()
        if region.payload is not None and region.stream is not None and region.stream != current:
            encoded = self.device.record(current)
            if encoded is not None:
                self.device.wait(encoded, region.stream)

    def begin_store(self, region: Region, *, later: bool) -> bool:  # its workers wait for a device anyway
        assert region.slot is not None
        lease = self.buffers.acquire(region.stored_bytes)
        if lease is None:
            return False
        source = region.payload
        if source is None:
            source = torch.empty(0, dtype=torch.uint8, device=region.tensor.device)
            source.set_(region.tensor.untyped_storage(), region.start, (region.nbytes,), (1,))
        region.lease = lease
        region.lead = 0
        region.event = self.device.copy_to_host(source, torch.frombuffer(lease.view(), dtype=torch.uint8))
        self._write(region)
        return True

    def _write(self, region: Region) -> None:
        assert region.slot is not None and region.lease is not None
        handle = self.device.event_handle(region.event)
        region.operation = self.store.write(region.slot, region.lease.address, after_event=handle)

    def depart(self, region: Region) -> None:
        if region.event is not None and not region.event.query():
            self.device.wait(region.event, region.stream)
            current = self.device.current_stream()
            if current != region.stream:
                self.device.wait(region.event, current)
        region.empty_()

    def end_store(self, region: Region) -> None:
        region.operation = None
        self._give_back(region)
        region.event = None
        region.payload = None

    def _give_back(self, region: Region) -> None:
        """Return the staging buffer when the copy that uses it has passed, that of a cancelled store or one back to the device.

        A copy off the device also reads memory that its owner may let go of next.
        """
        lease, region.lease = region.lease, None
        if lease is None:
            return
        event = region.load_event or region.event
        if event is None or event.query():
            lease.release()
        elif region.load_event is not None:
            self._passing[_TO_DEVICE].append(_Passing(event, lease, None))
        else:
            self._passing[_TO_HOST].append(_Passing(event, lease, region.tensor.untyped_storage()))

    def rewrite(self, region: Region) -> None:
        self._write(region)

    def recall(self, region: Region) -> bool:
        if region.payload is not None:
            _decode(self._coding, region, self._seen)
            return True
        if region.lease is None or region.in_tensor:
            return False
        host = torch.frombuffer(region.lease.view(), dtype=torch.uint8)
        region.loaded = self._copy_in(region, host, region.event)
        region.loaded_version = region.loaded._version
        return True

    def begin_load(self, region: Region, *, asked: bool, outside: bool = False) -> bool:
        assert region.slot is not None
        lease = self.buffers.acquire(region.stored_bytes)
        if lease is not None:
            region.lease = lease
            region.operation = self.store.read(region.slot, lease.address, later=not asked)
        elif outside:
            region.loaded = torch.empty(region.stored_bytes, dtype=torch.uint8)
            region.operation = self.store.read(region.slot, region.loaded.data_ptr())
        else:
            return False
        return True

    def advance_load(self, region: Region) -> None:
        if region.lease is not None:
            host = torch.frombuffer(region.lease.view(), dtype=torch.uint8)
        else:
            assert region.loaded is not None
            host = region.loaded
        target = self._copy_in(
            region, host
        )  # may find no memory: then it is as before, and may be tried again
        region.operation = None
        if region.lease is None and region.load_event is not None:
            self._passing[_TO_DEVICE].append(_Passing(region.load_event, None, host))
        self._give_back(region)
        if region.codec is None:
            region.loaded = target
            region.loaded_version = target._version
        else:
            region.loaded, region.payload = None, target

    def _copy_in(self, region: Region, host: torch.Tensor, after: Event | None = None) -> torch.Tensor:
        """Queue the copy of `host` to the device, behind `after`."""
        self.reserve_target(region, host.numel())
        target = region.target
        assert target is not None
        tensor = self.targets.take(target)
        awaited = target.awaited if after is None else [*target.awaited, after]
        region.load_event = self.device.copy_to_device(host, tensor, awaited)
        return tensor

    def reserve_target(self, region: Region, nbytes: int) -> None:
        """Have the device memory for `region`, whose load is under way. See Note: [Load targets]."""
        if region.target is None or region.target.tensor is None:  # none yet, or that of an earlier load
            region.target = self.targets.reserve(nbytes)
            assert region.target.tensor is not None
            self._seen(region.target.tensor.untyped_storage())

    def end_load(self, region: Region) -> None:
        if region.load_event is not None:
            self.device.wait(region.load_event)
        if region.target is not None:
            self.targets.hand_out(region.target)
        if region.payload is not None and region.loaded is None:
            _decode(self._coding, region, self._seen)
            region.payload = region.target = region.load_event = None

    def abandon_load(self, region: Region) -> None:
        region.operation = None
        self._give_back(region)
        region.loaded = None
        region.payload = None
        region.load_event = None
        region.drop_target()

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
