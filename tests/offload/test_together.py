"""What spares the thread that trains: stores that wake the I/O pool together, loads that are issued several at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssdtrain.offload.region import Region
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, settled
from tests.offload.test_races import SIZE, chain, engine_of


@pytest.mark.parametrize("way", VARIANTS[:2], ids=lambda v: v.name)
def test_stores_wake_the_pool_together(way: Variant, make_runtime: MakeRuntime) -> None:
    """Up to the bytes of the largest tensor: of equal ones every second wakes it."""
    runtime = make_runtime(way)
    flags: list[bool] = []
    write = runtime.offload.store.write

    def record(*args: Any, defer: bool, **more: Any) -> Any:
        flags.append(defer)
        return write(*args, defer=defer, **more)

    runtime.offload.store.write = record
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

    loads.begin = record
    with runtime.backward():
        loss.backward()
    assert len(cursors) >= 10 and len(set(cursors)) <= len(cursors) // 2


@pytest.mark.parametrize("way", VARIANTS[:3], ids=lambda v: v.name)
def test_a_large_load_is_issued_as_soon_as_it_fits(way: Variant, make_runtime: MakeRuntime) -> None:
    """All that fit are ahead whenever backward asks: it may need the next one at once."""
    runtime = make_runtime(way, prefetch="768KiB")  # three regions
    _, loss = chain(runtime, depth=12)
    settled(runtime)
    loads = engine_of(runtime).mover.loads
    ahead: list[int] = []
    hand_out = loads.hand_out

    def record(region: Region) -> Any:
        ahead.append(loads.prefetched_bytes)
        return hand_out(region)

    loads.hand_out = record
    with runtime.backward():
        loss.backward()
    assert len(ahead) >= 10 and set(ahead[:-3]) == {768 << 10}


@pytest.mark.parametrize("apart", [2, 12])
@pytest.mark.parametrize("way", VARIANTS[:3], ids=lambda v: v.name)
def test_a_tensor_that_is_used_again_later_does_not_end_what_is_read_ahead(
    way: Variant, apart: int, make_runtime: MakeRuntime
) -> None:
    """An encoder's output is needed by the last layer of the decoder first, and long after that by the encoder."""
    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x.exp().sin()
        for _ in range(4):
            y = y.sin()
        used_twice = z = y.cos().clone()
        for _ in range(apart):
            z = z.sin()
        return (z * used_twice).sum()

    [expected] = torch.autograd.grad(forward(), x)
    runtime = make_runtime(way, prefetch="1MiB")
    with runtime.forward():
        loss = forward()
    settled(runtime)
    loads = engine_of(runtime).mover.loads
    demanded: list[int] = []
    begin = loads.begin

    def record(region: Region, *, on_demand: bool) -> bool:
        if on_demand:
            demanded.append(region.index)
        return begin(region, on_demand=on_demand)

    loads.begin = record
    with runtime.backward():
        loss.backward()
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert len(demanded) <= (0 if apart > 8 else 1)
