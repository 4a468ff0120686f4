"""A reserved range in one tier, and the state of its content."""

from __future__ import annotations

from operator import methodcaller
from typing import TYPE_CHECKING

from ssdtrain.storage import memory
from ssdtrain.storage.errors import IOCancelled
from ssdtrain.storage.pool import Operation
from ssdtrain.storage.records import record

if TYPE_CHECKING:
    from ssdtrain.device import Event

_done = methodcaller("done")


@record()
class Slot:
    """A reserved range of `nbytes` in one tier. Created by `SpillStore.reserve`.

    Attributes:
        nbytes: size.
        tier: "host" or "ssd".
        drive: index of the (first) drive; -1 in the host tier.
        address: of the bytes in the host tier, else 0.
        pinned: a device copies to and from that memory itself: see `SpillStore.copied_in`.
    """

    nbytes: int
    address: int
    pinned: bool
    _extents: tuple[int, ...]
    """Flat: queue, offset, length, ...; in the host tier: ()."""
    _held: bool = True
    """Deleted when it is freed, once."""
    _writes: tuple[tuple[Operation, int], ...] = ()
    """Writes, with their page offsets, that are not known to be cancelled."""
    _operations: tuple[Operation, ...] = ()
    _copied: Event | None = None
    """The last copy of a device to it or from it, once it is freed."""

    @property
    def tier(self) -> str:
        return "host" if self.address else "ssd"

    @property
    def drive(self) -> int:
        return -1 if self.address else self._extents[0]

    def __repr__(self) -> str:
        return f"Slot({self.nbytes} bytes, {self.tier}{'' if self.drive < 0 else f' {self.drive}'})"

    def view(self) -> memoryview:
        """The bytes in the host tier, writable; the slot must be held meanwhile."""
        assert self.address
        return memory.view(self.address, self.nbytes)

    def unused(self) -> bool:
        """Whether all transfers of a freed slot have ended."""
        copied = self._copied
        if copied is not None and not copied.query():
            return False
        return not self._operations or all(map(_done, self._operations))

    def record(self, operation: Operation, written_at: int | None) -> None:
        """Record a queued transfer; of a write, the address modulo 4096 that it writes from."""
        if written_at is not None:
            writes = self._writes
            if writes:
                # The earlier content remains until this write starts; a cancelled write changes nothing.
                writes = tuple([one for one in writes if not isinstance(one[0].failed(), IOCancelled)][-1:])
            self._writes = (*writes, (operation, written_at))
        earlier = self._operations
        if not earlier:
            self._operations = (operation,)
            return
        if len(earlier) > 1:  # rare: a slot is usually written once and read once
            earlier = tuple([old for old in earlier if not old.done()])
        self._operations = (*earlier, operation)

    def readable_write(self) -> tuple[int, int, int]:
        """(page offset, checksum, digest) of the write whose bytes the slot holds; cancelled writes are skipped.

        Raises:
            ValueError: no write has succeeded, or the last one is still in flight.
        """
        for operation, page_offset in reversed(self._writes):
            ended = operation.done()  # first: what ends later has no error yet
            error = operation.failed()
            if error is None:
                if ended:
                    return page_offset, operation.checksum, operation.digest
                raise ValueError(f"cannot read {self}: its write has not ended")
            if not isinstance(error, IOCancelled):
                raise ValueError(f"cannot read {self}: its write failed: {error}")
        raise ValueError(f"cannot read {self}: it was never written")
