"""What the end of an engine waits for.

Note: [Transfers that never end]
A system call on a drive ends, or the kernel fails it. A transfer of cuFile may hang in a driver: it is waited for a bounded time.
After that it may still read or fill the memory of its region, which therefore stays as long as the process lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ssdtrain.offload.mover import wait_quietly
from ssdtrain.offload.region import Region
from ssdtrain.offload.transfer_state import State
from ssdtrain.storage import Operation

__all__ = ["Busy", "busy_regions", "wait_for_ends"]

logger = logging.getLogger("ssdtrain")

Busy = tuple[Region, Operation, bool, bool]
"""A region with a transfer under way, whether that is a load, and whether it is one of device memory itself."""

_HUNG: list[Region] = []
"""See Note: [Transfers that never end]."""


def busy_regions(regions: Sequence[Region]) -> list[Busy]:
    """Those of `regions` with a transfer under way. Called with the engine's lock held."""
    return [
        (region, operation, region.transfer.state is State.LOADING, region.transfer.in_place)
        for region in regions
        if (operation := region.transfer.operation) is not None
    ]


def wait_for_ends(busy: Sequence[Busy], deadline: float, patience: float) -> int:
    """Wait `deadline` seconds for stores, and for loads as long as they take, with a warning each `patience` seconds. For those
    of device memory itself `patience` seconds; see Note: [Transfers that never end].

    Returns:
        Bytes of transfers of device memory itself that are still under way.
    """
    began = time.monotonic()
    for _, operation, loading, _ in busy:
        if not loading:
            wait_quietly(operation, max(0.0, began + deadline - time.monotonic()))
    for _, operation, loading, in_place in busy:
        if in_place:
            wait_quietly(operation, max(0.0, began + patience - time.monotonic()))
            continue
        while loading and not wait_quietly(operation, patience):
            logger.warning("close has waited %g s for %d bytes to come back", patience, operation.nbytes)
    hung = [region for region, operation, _, in_place in busy if in_place and not operation.done()]
    _HUNG.extend(hung)
    return sum(region.nbytes for region in hung)
