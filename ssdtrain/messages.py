"""Log lines enabled by `report.interval`, shown independently of the framework's log levels and handlers."""

from __future__ import annotations

import logging
import sys

LOGGER = "ssdtrain.report"
"""The logger of these lines. Its level and that of "ssdtrain" apply; levels of parent loggers do not."""


def report(message: str) -> None:
    """Log `message` at INFO, or write it to stderr if no handler is configured."""
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
