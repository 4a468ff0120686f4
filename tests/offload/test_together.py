"""What spares the thread that trains: stores that wake the I/O pool together, loads that are issued several at a time."""

from __future__ import annotations

from typing import Any

import pytest

from ssdtrain.offload.region import Region
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, settled
from tests.offload.test_races import chain, engine_of


@pytest.mark.parametrize("way", VARIANTS[:2], ids=lambda v: v.name)
def test_stores_wake_the_pool_together(way: Variant, make_runtime: MakeRuntime) -> None:
    """Up to the bytes of the largest tensor: of equal ones every second wakes it."""
    runtime = make_runtime(way)
    assert runtime.offload.store is not None
    flags: list[bool] = []
    write = runtime.offload.store.write

    def record(*args: Any, defer: bool, **more: Any) -> Any:
        flags.append(defer)
        return write(*args, defer=defer, **more)

    runtime.offload.store.write = record  # type: ignore[method-assign]
    _, loss = chain(runtime, depth=6)
    assert len(flags) >= 6 and flags == [True, False] * (len(flags) // 2) + [True] * (len(flags) % 2)
    del loss


@pytest.mark.parametrize("way", VARIANTS[:3], ids=lambda v: v.name)
def test_loads_are_issued_several_at_a_time(way: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(way, prefetch="1MiB")  # four regions
    _, loss = chain(runtime, depth=12)
    settled(runtime)
    loads = engine_of(runtime).mover.loads
    cursors: list[int | None] = []
    begin = loads.begin

    def record(region: Region, *, on_demand: bool) -> bool:
        cursors.append(region.tape.cursor)
        return begin(region, on_demand=on_demand)

    loads.begin = record  # type: ignore[method-assign]
    with runtime.backward():
        loss.backward()
    assert len(cursors) >= 10 and len(set(cursors)) <= len(cursors) // 2
