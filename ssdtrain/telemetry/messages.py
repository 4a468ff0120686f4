"""Lines that a user asked for by `report.interval`, shown whatever level and handlers the framework gave its loggers."""

from __future__ import annotations

import logging
import sys

__all__ = ["LOGGER", "report"]

LOGGER = "ssdtrain.report"
"""The logger of these lines. A level set on it, or on "ssdtrain", is obeyed; those of the loggers above are not."""


def report(message: str) -> None:
    """Log `message` at INFO. Where no handler is configured it is written to stderr."""
    logger = logging.getLogger(LOGGER)
    chosen = logger.level or logging.getLogger("ssdtrain").level
    if chosen > logging.INFO or logger.disabled:
        return
    if not logger.hasHandlers():
        print(f"[ssdtrain] {message}", file=sys.stderr, flush=True)
        return
    logger.handle(
        logger.makeRecord(LOGGER, logging.INFO, __file__, 0, f"[ssdtrain] {message}", (), None, "report")
    )
