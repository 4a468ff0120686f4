"""How much of a tape leaves memory: the object that the pack hook asks for every region.

The last saved tensors of a tape are needed first by backward, so they are the ones that stay. How large a tape will be is
known from the tapes before it: until one has completed, everything is offloaded.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ssdtrain.config import Amount
from ssdtrain.offload.tape import Tape

__all__ = ["AmountPlan", "Plan"]


class Plan(Protocol):
    """Chooses for each region of a tape; the planner's own object will take this place."""

    def offload(self, tape: Tape, nbytes: int) -> bool:
        """True if the next region of `tape`, of `nbytes` bytes, is to leave memory."""

    def finished(self, tape: Tape) -> None:
        """The forward of `tape` came to its end: learn its size."""


REMEMBERED = 8
"""Tapes of a chunk: what one was like says little of the next, but one of the last few is as long."""


class AmountPlan:
    """`offload.amount`: everything, a fraction of the bytes, or all but a number of bytes that stay."""

    def __init__(self, amount: Amount) -> None:
        self.amount = amount
        # Bytes of the latest complete tapes, by model chunk: chunks of a pipeline differ (the first has the embedding).
        self._totals: dict[int, deque[int]] = {}

    def offload(self, tape: Tape, nbytes: int) -> bool:
        totals = self._totals.get(tape.chunk)
        if self.amount.kind == "all" or totals is None:
            return True
        # Their largest: after a short microbatch the next long one would keep all that it is longer by.
        total = max(totals)
        if self.amount.kind == "fraction":
            limit = int(self.amount.value * total)
        else:
            limit = total - int(self.amount.value)
        return tape.nbytes + nbytes <= limit

    def finished(self, tape: Tape) -> None:
        if tape.nbytes:
            self._totals.setdefault(tape.chunk, deque(maxlen=REMEMBERED)).append(tape.nbytes)
