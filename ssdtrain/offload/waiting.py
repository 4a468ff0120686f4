"""Waits for one transfer, outside of the engine's lock."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from ssdtrain.offload.loads import Loads
from ssdtrain.offload.region import Region
from ssdtrain.storage import IOCancelled, IOFailure, Operation, SourceChanged

__all__ = ["wait_for_load", "wait_quietly"]

logger = logging.getLogger("ssdtrain")


def wait_quietly(operation: Operation, timeout: float) -> bool:
    """Wait until `operation` is over, well or not: the mover sees to how it ended. False: timeout."""
    try:
        return operation.wait(timeout)
    except (IOFailure, IOCancelled, SourceChanged):
        return True


def wait_for_load(
    operation: Operation, region: Region, loads: Loads, lock: AbstractContextManager[object], patience: float
) -> None:
    """Wait for the bytes that backward needs; after `patience` seconds warn, and give a read up that can be made another way."""
    if not wait_quietly(operation, patience):
        logger.warning("backward has waited %g s for %d bytes", patience, region.nbytes)
        with lock:
            loads.give_up(region)
