"""What the end of an engine waits for, and for how long: see Note: [Transfers that never end] in `transfer.loads`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from ssdtrain.device import Device, Event
from ssdtrain.offload.tensors.region import Region, Releases
from ssdtrain.offload.transfer.loads import Loads, keep_for_ever
from ssdtrain.offload.transfer.state import State
from ssdtrain.patience import Patience
from ssdtrain.storage import IOCancelled, IOFailure, Operation, SignalSafeLock, SourceChanged, forks

logger = logging.getLogger("ssdtrain")

Busy = tuple[Region, Operation, bool, bool]
"""A region with a transfer under way, whether that is a load, and whether it is one of device memory itself."""


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


def busy_regions(regions: Sequence[Region]) -> list[Busy]:
    """Return those of `regions` with a transfer under way. Called with the engine's lock held."""
    return [
        (region, operation, region.transfer.state is State.LOADING, region.transfer.in_place)
        for region in regions
        if (operation := region.transfer.operation) is not None
    ]


def wait_for_all(
    busy: Sequence[Busy],
    deadline: float,
    next_copy: Callable[[], Event | None],
    device: Device,
    patience: float,
) -> None:
    """Wait for transfers, and then for copies: see `wait_for_ends` and `wait_for_copies`.

    Raises:
        TimeoutError: some have not ended; names them, and what to do.
    """
    hung = wait_for_ends(busy, deadline, patience)
    check_ended(hung, wait_for_copies(next_copy, device, patience), patience)


def wait_for_ends(busy: Sequence[Busy], deadline: float, patience: float) -> int:
    """Wait `deadline` seconds for stores, and for loads as long as they take, with a warning each `patience` seconds. For those
    of device memory itself until none has ended for `patience` seconds.

    Returns:
        Bytes of transfers of device memory itself that are still under way.
    """
    began = time.monotonic()
    for _, operation, loading, _ in busy:
        if not loading:
            wait_quietly(operation, max(0.0, began + deadline - time.monotonic()))
    direct = [operation for _, operation, _, in_place in busy if in_place]
    limit = Patience(patience, lambda: sum(operation.done() for operation in direct))
    all(limit.wait(partial(wait_quietly, operation)) for operation in direct)  # until one does not end
    for _, operation, loading, in_place in busy:
        while loading and not in_place and not wait_quietly(operation, patience):
            logger.warning("close has waited %g s for %d bytes to come back", patience, operation.nbytes)
    hung = [region for region, operation, _, in_place in busy if in_place and not operation.done()]
    keep_for_ever(*hung)
    return sum(region.nbytes for region in hung)


def wait_for_copies(next_copy: Callable[[], Event | None], device: Device, patience: float) -> bool:
    """Wait for the copies that use host memory, until nothing of the device has ended for `patience` seconds.

    Args:
        next_copy: the end of the next one; None: all have ended.

    Returns:
        False: one has not ended.
    """
    limit = Patience(patience, device.progress)
    while (event := next_copy()) is not None:
        if not limit.wait(partial(device.block, event)):
            return False
    return True


def check_ended(hung_bytes: int, copies_ended: bool, patience: float) -> None:
    """Raise if not everything that `wait_for_ends` and `wait_for_copies` waited for has ended.

    Raises:
        TimeoutError: names what has not, and what to do.
    """
    if hung_bytes:
        raise TimeoutError(
            f"GPUDirect transfers of {hung_bytes} bytes do not end, and none has for {patience:g} s: their memory stays until "
            'the process ends; see dmesg, and set offload.gpudirect to "off"'
        )
    if not copies_ended:
        raise TimeoutError(
            f"copies between the device and host memory do not end, and none has for {patience:g} s: pinned memory stays "
            "until the process ends. Is a collective before them waiting for a rank that is gone?"
        )


def drain_at_deaths(
    releases: Releases, lock: SignalSafeLock, device: Device, drain: Callable[[], None]
) -> None:
    """An engine has ended, and nobody else looks at what dies: let each death of a handle call `drain`, with `lock` held, which
    the caller has. What such a graph needed of the arena goes back with the graph.

    Finalizers wait for no lock, and ask no event during a capture: what dies then is drained with the next one.
    """
    generation = forks.generation()

    def died() -> None:
        if generation != forks.generation() or device.capturing():
            return
        while not releases.empty() and lock.acquire(blocking=False):
            try:
                drain()
            finally:
                lock.release()

    releases.call_at_each(died)
