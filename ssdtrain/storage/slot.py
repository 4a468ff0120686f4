"""A place for bytes in one tier, and what is known of its content."""

from ssdtrain.storage.arena import Lease
from ssdtrain.storage.errors import IOCancelled
from ssdtrain.storage.pool import Operation


class Slot:
    """A place for `nbytes` bytes in one tier. Opaque but for the attributes without an underscore.

    `tier` is "host" or "ssd"; `drive` the index of the (first) drive; `address` that of the bytes in the host
    tier, else 0.
    """

    __slots__ = (
        "_extents",
        "_held",
        "_lease",
        "_operations",
        "_writes",
        "address",
        "drive",
        "nbytes",
        "tier",
    )

    def __init__(self, nbytes: int, extents: tuple[int, ...], lease: Lease | None) -> None:
        self.nbytes = nbytes
        self.tier = "ssd" if lease is None else "host"
        self.drive = extents[0] if lease is None else -1
        self.address = 0 if lease is None else lease.address
        self._extents = extents  # flat: queue, offset, length, ...
        self._lease = lease
        self._writes: tuple[
            tuple[Operation, int], ...
        ] = ()  # those not known to be cancelled, with address % 4096 of each
        self._held = [True]
        self._operations: tuple[Operation, ...] = ()

    def __repr__(self) -> str:
        return f"Slot({self.nbytes} bytes, {self.tier}{'' if self.drive < 0 else f' {self.drive}'})"

    def note_write(self, operation: Operation, lead: int) -> None:
        """A write of the slot was queued, from an address that is `lead` modulo 4096."""
        if self._writes:
            # What was stored before stays until this one begins; one that was cancelled changed nothing.
            earlier = [write for write in self._writes if not isinstance(write[0].failed(), IOCancelled)]
            self._writes = (*earlier[-1:], (operation, lead))
        else:
            self._writes = ((operation, lead),)

    def written(self) -> tuple[int, int]:
        """(lead, `Operation.check`) of the write whose bytes the slot holds. One that was cancelled left what was there before.

        Raises:
            ValueError: no write has succeeded, or the last one has not ended.
        """
        for operation, lead in reversed(self._writes):
            error = operation.failed()
            if isinstance(error, IOCancelled):
                continue
            if error is not None:
                raise ValueError(f"{self} cannot be read, its write failed: {error}")
            if not operation.done():
                raise ValueError(f"{self} cannot be read yet: its write has not ended")
            return lead, operation.check
        raise ValueError(f"{self} was never written")
