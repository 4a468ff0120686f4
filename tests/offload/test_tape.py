"""The order in which backward will ask for what a forward saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdtrain.offload.policy import KEEP, OFFLOAD
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.tensors.tape import Tape
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, settled, watch_loads
from tests.offload.test_races import SIZE, chain
from tests.support.policies import Decides


def tape_of(*operators: int) -> Tape:
    """Regions of these operators, in the order in which they were saved."""
    tape = Tape()
    for index, operator in enumerate(operators):
        region: Any = SimpleNamespace(
            index=index, operator=operator, nbytes=1, last_pass=-1, pending_unpacks=1
        )
        tape.regions.append(region)
    return tape


def coming(tape: Tape) -> list[int]:
    return [region.index for region in tape.coming()]


def take(tape: Tape, index: int) -> None:
    """Backward asks for a region, and gets it."""
    tape.reached(index, again=False)
    region: Any = tape.regions[index]
    region.last_pass, region.pending_unpacks = tape.pass_number, 0


def test_operators_come_in_reverse_and_what_each_saved_in_its_order() -> None:
    tape = tape_of(0, 0, 1, 2, 2, 2)
    assert coming(tape) == [3, 4, 5, 2, 0, 1]


def test_the_rest_of_an_operator_comes_before_what_lies_below() -> None:
    """Else the buffers go to what is needed later, and what is needed now waits for them."""
    tape = tape_of(0, 0, 1, 1, 1)
    take(tape, 2)
    assert coming(tape) == [3, 4, 0, 1] and tape.end == 5
    take(tape, 3)
    take(tape, 4)
    assert coming(tape) == [0, 1]


def test_what_backward_has_passed_without_asking_does_not_come() -> None:
    """The loss of another head."""
    tape = tape_of(0, 1, 1, 2)
    take(tape, 0)
    assert coming(tape) == [] and tape.end == 1


@pytest.mark.parametrize("removed", [1, 2])
def test_what_was_released_is_left_out(removed: int) -> None:
    tape = tape_of(0, 1, 1, 1)
    region: Any = tape.regions[removed]
    tape.remove(region)
    assert coming(tape) == [index for index in (1, 2, 3, 0) if index != removed]


class SavesThree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x + 1, x + 2, x + 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        a, b, c = ctx.saved_tensors
        return grads[0] * a * b * c


def test_what_an_operator_saved_and_stays_belongs_to_it_too(make_runtime: MakeRuntime) -> None:
    """Else what lies before it on the tape would count as passed once backward is there."""
    runtime = make_runtime()
    runtime.engine.policy = Decides(lambda saved: KEEP if saved.position % 3 == 1 else OFFLOAD)
    x = torch.ones(512, requires_grad=True)
    with runtime.forward():
        loss = SavesThree.apply(SavesThree.apply(x)).sum()
    tape = runtime.offload.tape(0, -1)
    assert len(tape.regions) == 6
    assert coming(tape) == [3, 4, 5, 0, 1, 2]
    tape.reached(3, again=False)
    assert tape.end == 6
    loss.backward()
    assert torch.equal(x.grad, torch.full((512,), 576.0))


@pytest.mark.parametrize("uses", [1, 3])
def test_a_second_backward_reads_ahead_what_was_saved_far_apart(uses: int, make_runtime: MakeRuntime) -> None:
    """A table that layers far apart use."""
    runtime = make_runtime(prefetch="1MiB")  # four regions
    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def forward() -> torch.Tensor:
        table = x * 1
        y = table.sin()
        for _ in range(uses):
            for _ in range(12):
                y = y.sin()
            y = y * table
        return y.sum()

    with runtime.forward():
        loss = forward()
    settled(runtime)
    asked = watch_loads(runtime)
    counts = []
    for retain in (True, True, False):
        asked.clear()
        with runtime.backward():
            loss.backward(retain_graph=retain)
        counts.append((len(asked), sum(asked)))
    assert counts == [(2 + 12 * uses + uses - 1, 0)] * 3
    grad, x.grad = x.grad, None
    forward().backward()
    assert torch.allclose(grad, 3 * x.grad)


class SavesOneTwice(torch.autograd.Function):
    """Backward writes into one of two tensors that share their memory."""

    write = twice = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        a, b = ctx.saved_tensors
        if SavesOneTwice.twice:
            a, b = ctx.saved_tensors
        if SavesOneTwice.write:
            a.mul_(3)
        return grads[0] * b


@pytest.mark.parametrize(("twice", "passes"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_an_operator_that_saved_a_tensor_twice_has_it_once_in_each_pass(
    twice: bool, passes: int, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavesOneTwice, "twice", twice)
    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        for last in [False] * (passes - 1) + [True]:
            monkeypatch.setattr(SavesOneTwice, "write", last)
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        return found

    runtime = make_runtime()
    with runtime.forward():
        loss = SavesOneTwice.apply(x * 1).sum()
    settled(runtime)
    found = gradient(loss)
    assert torch.equal(found, gradient(SavesOneTwice.apply(x * 1).sum()))


@pytest.mark.parametrize("way", VARIANTS[:3], ids=lambda v: v.name)
def test_a_large_load_is_issued_as_soon_as_it_fits(way: Variant, make_runtime: MakeRuntime) -> None:
    """All that fit are ahead whenever backward asks: it may need the next one at once."""
    runtime = make_runtime(way, prefetch="768KiB")  # three regions
    _, loss = chain(runtime, depth=12)
    settled(runtime)
    loads = runtime.engine.mover.loads
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
    asked = watch_loads(runtime)
    with runtime.backward():
        loss.backward()
    assert torch.equal(x.grad, expected)
    assert sum(asked) <= (0 if apart > 8 else 1)
