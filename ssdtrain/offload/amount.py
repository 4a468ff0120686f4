"""How much of a tape leaves memory: the object that the pack hook asks for every region.

The last saved tensors of a tape are needed first by backward, so they are the ones that stay. How large a tape will be is
known from the tape before it: until one has completed, everything is offloaded.
"""

from __future__ import annotations

from typing import Protocol

from ssdtrain.config import Amount
from ssdtrain.offload.tape import Tape

__all__ = ["AmountPlan", "Plan"]


class Plan(Protocol):
    """Chooses for each region of a tape; the planner's own object will take this place."""

    def offload(self, tape: Tape, nbytes: int) -> bool:
        """True if the next region of `tape`, of `nbytes` bytes, is to leave memory."""

    def finished(self, tape: Tape) -> None:
        """The forward of `tape` is over: learn its size."""


class AmountPlan:
    """`offload.amount`: everything, a fraction of the bytes, or all but a number of bytes that stay."""

    def __init__(self, amount: Amount) -> None:
        self.amount = amount
        # Bytes of the latest complete tape, by model chunk: chunks of a pipeline differ (the first has the embedding).
        self._total: dict[int, int] = {}

    def offload(self, tape: Tape, nbytes: int) -> bool:
        total = self._total.get(tape.chunk)
        if self.amount.kind == "all" or total is None:
            return True
        if self.amount.kind == "fraction":
            limit = int(self.amount.value * total)
        else:
            limit = total - int(self.amount.value)
        return tape.nbytes + nbytes <= limit

    def finished(self, tape: Tape) -> None:
        if tape.nbytes:
            self._total[tape.chunk] = tape.nbytes
