"""Why a tensor that was to leave memory stays there: each reason is said once, with the figures of the first tensor."""

from __future__ import annotations

import logging

__all__ = ["CROWDED", "LATE", "TOO_LARGE", "Reasons"]

logger = logging.getLogger("ssdtrain")

LATE = (
    "stores in flight did not end within offload.deadline=%gs: a saved tensor of %d bytes stays in memory "
    "(counted in the report; faster drives, a lower offload.amount or more offload.buffer help)"
)
TOO_LARGE = (
    "a saved tensor of %d bytes is larger than offload.buffer (%d bytes), which all that is stored passes through: it "
    "stays in memory, and so does every other as large (counted in the report; more offload.buffer helps)"
)
CROWDED = (
    "a saved tensor of %d bytes finds no room in offload.buffer (%d bytes), where tensors for backward are, and stays in "
    "memory (counted in the report; more offload.buffer helps)"
)


class Reasons:
    """What was said already."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, why: str, *figures: float) -> None:
        """Log `why`, filled with `figures`, the first time."""
        if why not in self._told:
            self._told.add(why)
            logger.warning(why, *figures)
