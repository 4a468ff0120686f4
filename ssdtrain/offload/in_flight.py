"""The stores under way, and how many bytes they may be.

Note: [Departure in order]
On a CPU a tensor is in memory until its write has ended. So that the peak of a plan does not depend on when that is, a tensor
leaves when a later store needs its room among the bytes in flight, and not before; training waits there if the write still runs.
What is left of a forward when its backward begins stays in memory, and is not read back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ssdtrain.offload.region import Region
from ssdtrain.offload.transfer_state import State
from ssdtrain.storage import Operation

__all__ = ["StoresInFlight"]


class StoresInFlight(deque[Region]):
    """Regions being stored, in the order in which their stores began. Called with the engine's lock held, and never waits.

    Args:
        end: processes the end of the store of a region that has been taken off.
    """

    def __init__(self, end: Callable[[Region, Operation], None]) -> None:
        super().__init__()
        self.nbytes = 0
        """Of all of them; the mover counts."""
        self.allowed = 0
        """Bytes that may be under way, by `TransferLimits`."""
        self.bound: int | None = None
        """The same by a plan for a CPU; with it tensors leave in order. See Note: [Departure in order]."""
        self._end = end

    @property
    def limit(self) -> int:
        """Bytes that may be under way."""
        return self.allowed if self.bound is None else min(self.allowed, self.bound)

    @property
    def in_order(self) -> bool:
        """Tensors leave when later stores need their room."""
        return self.bound is not None

    def admits(self, nbytes: int) -> bool:
        """True if there is room for one more, which `in_order` the oldest make, where they have ended. A single store always
        has room."""
        if self.bound is None:
            return not self or self.nbytes + nbytes <= self.allowed
        while self and self.nbytes + nbytes > self.limit:
            if not self._end_oldest():
                return False
        return True

    def oldest(self) -> Operation | None:
        """The operation of the one that began first."""
        return self[0].transfer.operation if self else None

    def under_way(self) -> int:
        """Bytes of those that have not ended."""
        if not self.in_order:
            return self.nbytes
        transfers = (one.transfer for one in self)
        return sum(
            one.moved_bytes for one in transfers if one.operation is not None and not one.operation.done()
        )

    def reap(self) -> None:
        """Process those that have ended; `in_order` only what backward had, or is about to ask for."""
        if self.bound is None:  # each hook comes here
            while self and (operation := self[0].transfer.operation) is not None and operation.done():
                self._end(self.popleft(), operation)
            return
        for region in [
            one for one in self if one.transfer.keep_resident or one.transfer.state is State.RELEASED
        ]:
            operation = region.transfer.operation
            if operation is not None and operation.done():
                self.remove(region)
                self._end(region, operation)

    def _end_oldest(self) -> bool:
        """False: it is under way."""
        operation = self.oldest()
        if operation is None or not operation.done():
            return False
        self._end(self.popleft(), operation)
        return True
