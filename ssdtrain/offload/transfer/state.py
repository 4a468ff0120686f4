"""Where the bytes of a region are, and what their transfer holds meanwhile.

Owned by the mover: it alone changes a `TransferState`, with the engine's lock held. A transfer (`transfer.transfer`)
reads it and returns what it began (`Write`, `Read`) or made (`Arrival`), which the mover enters here.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from ssdtrain.storage import record

if TYPE_CHECKING:
    from ssdtrain.codecs import Codec
    from ssdtrain.device import Event
    from ssdtrain.offload.transfer.targets import Target
    from ssdtrain.storage import Lease, Operation, Slot


class State(enum.Enum):
    """Where the bytes of a region are."""

    RESIDENT = "resident"  # in memory only
    STORING = "storing"  # in memory, and on the way to a tier
    # In a staging buffer, or encoded in memory, only: its store was cancelled, or there is none.
    STAGED = "staged"
    STORED = "stored"  # in a tier only
    LOADING = "loading"  # in a tier, and on the way to memory
    LOADED = "loaded"  # in a tier and in memory
    RELEASED = "released"  # nowhere: they are not needed any more


_STORING, _LOADING = State.STORING, State.LOADING


class Encoded(NamedTuple):
    """A payload that was made."""

    payload: torch.Tensor
    stored_bytes: int
    """Size of the payload, which `payload` begins with. What is behind it takes the values where the codec overflowed, which the
    host does not know yet: see Note: [Overflow] in `coding`."""


class PayloadCheck(NamedTuple):
    """The overflow flag of a payload on its way to the host."""

    flag: torch.Tensor
    """uint8 [1] in pinned memory."""
    event: Event
    """The end of the copy."""


@record()
class Write:
    """A write that was queued."""

    operation: Operation
    page_offset: int = 0
    """Address of the bytes modulo the I/O alignment. They are read back to an address of the same offset."""
    lease: Lease | None = None
    """The staging buffer that is written from."""
    event: Event | None = None
    """What comes before it: the end of the copy into the buffer, or of the work that made the bytes."""
    in_place: bool = False
    """The memory of the tensor, or of its payload, is written from itself: it stays until the write has ended."""


@record()
class Read:
    """A read that was queued, into one of the three."""

    operation: Operation
    lease: Lease | None = None
    loaded: torch.Tensor | None = None
    payload: torch.Tensor | None = None
    target: Target | None = None
    """Memory of `loaded` or `payload`, where that is a device's."""
    event: Event | None = None
    """What comes before it."""
    in_place: bool = False
    """It fills device memory itself."""


@record()
class Arrival:
    """Bytes of a region that came back to memory, or are on the way there on the load stream."""

    loaded: torch.Tensor | None
    payload: torch.Tensor | None = None
    """Bytes in place of `loaded`: still encoded."""
    target: Target | None = None
    """The device memory that was filled; None: nothing was copied."""
    event: Event | None = None
    """The end of that copy."""
    decoded: Event | None = None
    """The end of the decoding of `loaded`."""


@record()
class TransferState:
    """State of one region, with the fields of a transfer that do not apply being None."""

    moved_bytes: int = 0
    """Bytes of the region, the first ones, that leave memory."""
    stored_bytes: int = 0
    """Bytes of them in the tier."""
    page_offset: int = 0
    loaded_version: int = 0
    saved_before: int = 0
    """Bytes of all regions saved before it, where it leaves in part."""

    state: State = State.RESIDENT
    planned: bool = False
    """A codec, a tier, a part or a write that must not be cancelled was chosen."""
    codec: Codec | None = None  # encodes it on the way to a tier
    tier: str | None = None  # that the policy wants it in
    must_write: bool = False  # its store is not cancelled
    rest: torch.Tensor | None = None  # a copy of what stays. See Note: [Parts of a region] in `rests`.
    # Address of the region modulo 64, when it left. See Note: [Alignment] in `tensors.geometry`.
    lead: int = 0
    slot: Slot | None = None
    # A device copies to and from the memory of its slot: Note: [Pinned host tier] in `staged`.
    pinned: bool = False
    in_place: bool = False  # the operation under way reads or fills device memory itself
    operation: Operation | None = None
    lease: Lease | None = None  # the staging buffer of a device copy
    # The copy off the device; where it is pinned the latest one to its slot or from it.
    event: Event | None = None
    load_event: Event | None = None  # the copy onto the device
    decoding: Event | None = None  # of what came back encoded, on the device
    target: Target | None = None  # the device memory that it fills
    payload: torch.Tensor | None = None  # encoded bytes, on their way to or from the tier
    # Of the payload and its copies, behind what is stored. Not 0: it may have overflowed.
    spare_bytes: int = 0
    raw_from: int = 0  # of the pinned memory with a payload that has overflowed: there the values begin
    loaded: torch.Tensor | None = None
    """What came back. See Note: [Buffers belong to the tensor] in `tensors.region`."""
    keep_resident: bool = False  # backward is near: keep the bytes when the store ends
    forwarded: bool = False  # backward got it while it was being stored; counted
    prefetched: bool = False  # loaded, or being loaded, before backward asked for it

    @property
    def staged_bytes(self) -> int:
        """Bytes of the pinned memory that a store passes through."""
        return self.stored_bytes + self.spare_bytes

    @property
    def arriving_lead(self) -> int:
        """Address of that memory modulo 64: of the region, unless what arrives is still encoded."""
        return self.lead if self.codec is None else 0

    def write_began(self, write: Write) -> None:
        """RESIDENT -> STORING."""
        self.operation, self.page_offset, self.lease = write.operation, write.page_offset, write.lease
        self.event, self.in_place = write.event, write.in_place
        self.state = _STORING

    def stays_resident(self) -> None:
        """-> RESIDENT: nothing is in a tier, and all bytes are in one piece of memory."""
        self.state, self.rest = State.RESIDENT, None

    def write_over(self) -> None:
        """Let go of what the write needed; its staging buffer has been given back."""
        if self.lease is not None:
            self.raw_from = 0  # from there on it was written
        self.operation = self.lease = self.event = self.payload = None

    def encoded(self, encoded: Encoded) -> None:
        """The payload is what will be stored."""
        self.payload, self.stored_bytes = encoded
        self.spare_bytes = encoded.payload.numel() - encoded.stored_bytes

    def kept_encoded(self) -> None:
        """RESIDENT -> STAGED: the payload is all there is."""
        self.operation = self.lease = self.event = None
        self.state = State.STAGED

    def overflowed(self, nbytes: int, raw_from: int) -> None:
        """The region, of `nbytes`, is stored as it is: pinned memory has it from `raw_from` on, behind the header."""
        self.codec = self.payload = None
        self.stored_bytes, self.raw_from = nbytes, raw_from

    def read_began(self, read: Read) -> None:
        """STORED -> LOADING."""
        self.operation, self.lease, self.in_place = read.operation, read.lease, read.in_place
        self.loaded, self.payload = read.loaded, read.payload
        if read.loaded is not None:
            self.loaded_version = read.loaded._version
        if read.target is not None:
            self.target, self.load_event = read.target, read.event
        self.state = _LOADING

    def arrived(self, arrival: Arrival) -> None:
        """The bytes are in memory, or follow on the load stream."""
        loaded = self.loaded = arrival.loaded
        self.payload = arrival.payload
        if loaded is not None:
            self.loaded_version = loaded._version
        self.decoding = arrival.decoded
        if arrival.target is not None:
            self.target, self.load_event = arrival.target, arrival.event

    def decoded(self, values: Arrival) -> None:
        """What was encoded is in memory as `values`."""
        self.arrived(values)
        self.target = self.load_event = None

    def drop_loaded(self) -> None:
        """Let go of what came back; tensors that were handed out own its memory."""
        self.loaded = self.payload = self.load_event = self.decoding = None
        if self.target is not None:
            self.drop_target()

    def drop_target(self) -> None:
        """Give up the device memory that was reserved, or that tensors which were handed out own."""
        if self.target is not None:
            self.target.tensor = None
            self.target = None
