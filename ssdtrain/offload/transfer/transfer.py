"""How a region's bytes get from a tensor to a tier and back.

Two ways. `DirectTransfer` lets the I/O pool read and write CPU tensors where they are: no copy in user space, and the tensor
stays until its write has ended. `ssdtrain.offload.transfer.staged` is for device memory.

Both are called with the engine's lock held and never wait. They read the state of a region's transfer and change nothing of
it: what they began or made is returned to the mover.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ssdtrain.device import Device, Event
from ssdtrain.offload.tensors.geometry import bytes_at
from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.transfer.buffers import Buffers
from ssdtrain.offload.transfer.coding import Coding
from ssdtrain.offload.transfer.rests import Rests
from ssdtrain.offload.transfer.state import Arrival, Encoded, PayloadCheck, Read, Write
from ssdtrain.offload.transfer.targets import LoadTargets, Target
from ssdtrain.storage import ALIGNMENT, Operation, Slot, SpillStore

NEVER_ASKED = "a tensor of the CPU, which is read and written in place, has no such move"


class Transfer(ABC):
    """The moves of one region; the mover decides when, and keeps the states. A way that has no such move returns None, or is
    never asked for it and raises.

    Attributes:
        copies: tensors are copied to a buffer first, so that one may be emptied (`depart`) before its write has ended.
        closed: the engine is closed: what is in a tier does not come back any more.
        targets: device memory that loads fill; None: the pool reads into the arena.
    """

    copies = closed = False
    targets: LoadTargets | None = None

    def __init__(
        self,
        store: SpillStore,
        buffers: Buffers,
        meter: ActivationMeter,
        coding: Coding,
        device: Device,
        verify: bool,
    ) -> None:
        self.store = store
        self.buffers = buffers
        self.device = device
        self.rests = Rests(device, meter.see_own)
        self.coding = coding
        self._seen = meter.see_own
        self._verify = verify

    @property
    def unstaged(self) -> bool:
        """A device copies to and from every slot itself: stores and loads take no memory of a buffer."""
        return False

    @property
    def largest(self) -> int | None:
        """Bytes of the largest region that it can store; None: of any."""
        return None

    def encode(self, region: Region) -> Encoded | None:
        """Return the payload of a region that has a codec; None: the codec cannot hold its bytes."""
        encoded = self.coding.encode(region)
        if encoded is not None:
            self._seen(encoded.payload.untyped_storage())
        return encoded

    def values_of(self, region: Region, payload: torch.Tensor) -> torch.Tensor:
        """Decode a payload."""
        loaded = self.coding.decode(region, payload)
        self._seen(loaded.untyped_storage())
        return loaded

    def check_payload(self, region: Region) -> PayloadCheck | None:
        """The payload is to take the place of the tensor, in memory. Returns what says whether it may; None: it may at once."""
        return None

    @abstractmethod
    def begin_store(self, region: Region, *, defer: bool) -> Write | None:
        """Queue the write of the region, or of its payload, to its slot. None: there is no buffer for it now.

        Args:
            defer: nothing waits for it, see `SpillStore.write`.
        """

    def copy_out(self, address: int, slot: Slot) -> Event | None:
        """Queue the copy of a region at `address`, which has no payload, to its slot, which is pinned. Returns its end."""
        raise AssertionError(NEVER_ASKED)

    def depart(self, region: Region) -> None:
        """Let the stream of a region wait for its store, whose copy has not ended: then its tensor may be emptied."""
        raise AssertionError(NEVER_ASKED)

    def give_back(self, region: Region) -> None:
        """Return the staging buffer of the region once no copy uses it."""
        return None

    def overflowed(self, region: Region) -> bool:
        """Whether the payload of a region (with `TransferState.spare_bytes`) has overflowed, whose store is over."""
        raise AssertionError(NEVER_ASKED)

    @abstractmethod
    def rewrite(self, region: Region) -> Operation:
        """Write again, to a new slot, what a failed write left in memory."""

    def stop_in_place(self, error: OSError) -> None:
        """A transfer of device memory itself has failed (`Write.in_place`, `Read.in_place`): make no more of them."""
        raise AssertionError(NEVER_ASKED)

    @abstractmethod
    def recall(self, region: Region) -> Arrival | None:
        """Bring back the bytes of a region being stored from its payload or its buffer. None: they are still in the tensor."""

    def copy_back(self, region: Region) -> Arrival:
        """Queue the copy of a `pinned` region from its slot to the device.

        Raises:
            RuntimeError: the engine or the store was closed.
            torch.OutOfMemoryError: there is no memory for it.
        """
        raise AssertionError(NEVER_ASKED)

    @abstractmethod
    def begin_load(self, region: Region, *, on_demand: bool, allow_unpooled: bool = False) -> Read | None:
        """Queue the read of the region. None: the arena is full.

        Args:
            on_demand: backward waits for it; else it may begin with others.
            allow_unpooled: allocate outside of the arena where that is full.
        """

    def advance_load(self, region: Region) -> Arrival | None:
        """The read has ended: begin what follows it. None: nothing does."""
        return None

    @abstractmethod
    def end_load(self, region: Region) -> Arrival | None:
        """Order what follows on the current stream after the load. Returns the values of what came back encoded."""

    def reserve_target(self, region: Region) -> Target:
        """The device memory for a region that is about to come back."""
        raise AssertionError(NEVER_ASKED)

    def poll(self) -> None:
        """Return the buffers whose copies have passed."""
        return None

    def passing(self) -> Event | None:
        """The end of the oldest copy that uses host memory; None: there is none."""
        return None

    def returning(self) -> Event | None:
        """The end of the copy after which a staging buffer comes back; None: no buffer is in use by a copy alone."""
        return None


class DirectTransfer(Transfer):
    """CPU tensors, read and written in place by the I/O pool. No device copies to a tier or from it, and what overflows is stored
    as it is from the start."""

    def begin_store(self, region: Region, *, defer: bool) -> Write | None:
        slot = region.transfer.slot
        assert slot is not None
        address = address_of(region)
        return Write(self.store.write(slot, address, defer=defer, verify=self._verify), address % ALIGNMENT)

    def rewrite(self, region: Region) -> Operation:
        slot, operation = region.transfer.slot, region.transfer.operation
        assert slot is not None and operation is not None
        return self.store.write(slot, address_of(region), checksum=operation.checksum, verify=self._verify)

    def recall(self, region: Region) -> Arrival | None:
        payload = region.transfer.payload
        return None if payload is None else Arrival(self.values_of(region, payload), payload)

    def begin_load(self, region: Region, *, on_demand: bool, allow_unpooled: bool = False) -> Read | None:
        transfer = region.transfer
        assert transfer.slot is not None
        nbytes = transfer.stored_bytes if transfer.rest is None else region.nbytes
        offset = transfer.page_offset
        # As many pages wherever it lies in them: into the place of one that needs a page less the next one would not fit.
        lease = self.buffers.acquire(nbytes + ALIGNMENT - 1 - offset, offset)
        if lease is not None:  # it goes back when the storage dies
            buffer = torch.frombuffer(lease.owning_view(), dtype=torch.uint8, count=nbytes)
        elif allow_unpooled or not self.buffers.used:
            buffer = bytes_at(transfer.arriving_lead, nbytes, torch.device("cpu"))
            self._seen(buffer.untyped_storage())
        else:
            return None
        if transfer.rest is not None:
            self.rests.put_back(region, buffer)
        operation = self.store.read(transfer.slot, buffer.data_ptr(), defer=not on_demand)
        if transfer.codec is None:
            return Read(operation, None, buffer)
        return Read(operation, None, None, buffer)

    def end_load(self, region: Region) -> Arrival | None:
        payload = region.transfer.payload
        if payload is None or region.transfer.loaded is not None:
            return None
        return Arrival(self.values_of(region, payload))


def address_of(region: Region) -> int:
    """Address of what is stored: of the payload, or of the region."""
    payload = region.transfer.payload
    return region.pointer + region.start if payload is None else payload.data_ptr()
