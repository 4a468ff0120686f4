"""Warnings that are logged once: why a tensor that was to leave memory stays there, with the values of the first tensor."""

from __future__ import annotations

import logging

__all__ = ["BUFFER_FULL", "STORE_TIMEOUT", "TOO_LARGE", "WarnOnce"]

logger = logging.getLogger("ssdtrain")

STORE_TIMEOUT = (
    "stores in flight did not end within offload.deadline=%gs: a saved tensor of %d bytes stays in memory "
    "(counted in the report; faster drives, a lower offload.amount or more offload.buffer help)"
)
TOO_LARGE = (
    "a saved tensor of %d bytes is larger than offload.buffer (%d bytes), which all that is stored passes through: it "
    "stays in memory, and so does every other as large (counted in the report; more offload.buffer helps)"
)
BUFFER_FULL = (
    "a saved tensor of %d bytes finds no room in offload.buffer (%d bytes), where tensors for backward are, and stays in "
    "memory (counted in the report; more offload.buffer helps)"
)


class WarnOnce:
    """Logs each message the first time it is given."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, message: str, *values: float) -> None:
        """Log `message`, formatted with `values`."""
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message, *values)
