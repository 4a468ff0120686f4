"""On a CPU that follows a plan tensors leave when later stores need their room, whatever the drive does."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.runtime import Runtime
from ssdtrain.storage import Faults
from tests.offload.conftest import MakeRuntime, Variant, settled
from tests.support.tiers import tiered

REGION = 64 * 64 * 4
IN_ORDER = Variant("in-order", bound=3 * REGION)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"prefetch": 0},
    {"codec": "lossless"},
    {"host": "64KiB"},
    {"engine": "python"},
    {"in_flight": 1},
]
SLOW = Faults(seed=1, delay=1.0, max_delay=0.002)


def step(
    runtime: Runtime | None, *, waits: bool = False
) -> tuple[torch.Tensor | None, OffloadMetrics | None]:
    """The gradient of a chain of twelve regions, and the counters. `waits`: the drive is far ahead of every operator."""
    x = torch.randn(64, 64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    y = x
    if runtime is None:
        for _ in range(12):
            y = y.sin()
        y.sum().backward()
        return x.grad, None
    with runtime.forward():
        for _ in range(12):
            y = y.sin()
            if waits:
                runtime.engine.mover.flush()
                settled(runtime)
        loss = y.sum()
    del y
    loss.backward()
    del loss
    found = runtime.statistics()
    return x.grad, found.offload


def test_the_peak_does_not_depend_on_when_stores_end(make_runtime: MakeRuntime) -> None:
    expected, _ = step(None)
    peaks = []
    for faults, waits in ((None, False), (None, True), (SLOW, False)):
        runtime = make_runtime(IN_ORDER, faults=faults)
        step(runtime)  # the arena of loads is there from now on
        runtime.reset_peak()
        gradient, found = step(runtime, waits=waits)
        assert torch.equal(gradient, expected)
        assert found.loaded_bytes > 0
        peaks.append(found.activation_peak_bytes - found.buffer_bytes)
    # What may be in flight, what the last operator saved, and what the next one does; the input, which is the caller's.
    assert peaks == [3 * REGION + 2 * REGION + REGION] * 3


def test_what_is_left_of_a_forward_is_not_read_back(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(IN_ORDER)
    _, found = step(runtime, waits=True)
    assert found.saved_bytes - found.loaded_bytes == 3 * REGION
    assert found.in_flight_bytes == 0


@pytest.mark.parametrize("order", ["abAB", "abBA", "aAbB", "abAAB"])
@pytest.mark.parametrize(
    "options", tiered(OPTIONS, quick=OPTIONS[:1]), ids=lambda one: next(iter(one), "default")
)
def test_gradients_are_those_without_in_every_order_of_passes(
    order: str, options: dict[str, Any], make_runtime: MakeRuntime
) -> None:
    """Forwards are small letters; a backward that comes twice retains its graph the first time."""
    slow = None if options.get("engine") == "python" else SLOW
    runtime = make_runtime(IN_ORDER, faults=slow, **options)
    for _ in range(2):
        assert torch.equal(gradients(order, runtime), gradients(order, None))


def gradients(order: str, runtime: Runtime | None) -> torch.Tensor:
    x = torch.randn(64, 64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    losses: dict[str, torch.Tensor] = {}
    for at, one in enumerate(order):
        if one.islower():
            with nullcontext() if runtime is None else runtime.forward(microbatch=ord(one)):
                y = x * (1 + ord(one) % 7)
                for _ in range(8):
                    y = y.sin() * y
                losses[one.upper()] = y.sum()
            del y
        else:
            losses[one].backward(retain_graph=one in order[at + 1 :])
    return x.grad


def test_a_failed_drive_and_a_forward_without_backward_leave_nothing(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(IN_ORDER, faults=Faults(fail_writes=frozenset({2, 7})))
    gradient, _ = step(runtime)
    expected, _ = step(None)
    assert torch.equal(gradient, expected)
    with runtime.forward():
        y = torch.randn(64, 64, requires_grad=True)
        for _ in range(12):
            y = y.sin()
    del y  # the fixture sees that nothing is left


def test_nothing_is_held_by_a_closed_engine_whose_forward_had_no_backward(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(IN_ORDER)
    x = torch.randn(64, 64, requires_grad=True)
    with runtime.forward():
        y = x
        for _ in range(12):
            y = y.sin()
    engine = runtime.engine
    assert engine.mover.stores
    runtime.close()
    assert not engine.mover.stores
