"""Blocks that compute by what their modules keep in plain attributes: a second run finds these as the first one did."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ssdtrain
from ssdtrain.planner.recompute.attributes import SMALL
from ssdtrain.planner.recompute.modules import recompute_blocks
from tests.planner.test_plan_auto import STEPS, Stack, auto_of, equal, train
from tests.planner.test_plan_safety import LEAST


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)


class Replaces(Keeps):
    """Keeps a moving average in a plain attribute, by assignment, and subtracts it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().flatten(0, -2).mean(0)
        return self.linear(x - self.average).tanh()


class Makes(Keeps):
    """Its first forward makes an attribute, and is not computed as those after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = x.detach().abs().max() + 1
            return self.linear(x)
        return self.linear(x * self.scale).tanh()


class Appends(Keeps):
    """Computes by what its forwards have left in containers, one inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"means": [], "last": deque(maxlen=2)}  # type: ignore[var-annotated]
        self.kinds = set[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["means"].append(x.detach().mean())
        self.seen["last"].append(x.detach())
        self.kinds.add(len(self.seen["means"]) % 3)
        return self.linear(x * sum(self.seen["means"]) + self.seen["last"][0] * len(self.kinds)).tanh()


class InPlace(Keeps):
    """Adds to a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average += x.detach().flatten(0, -2).mean(0)
        return self.linear(x - self.average).tanh()


class WritesParameter(Keeps):
    """Counts in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.runs += 1
        return self.linear(x * self.runs).tanh()


def stack(kind: Callable[[], nn.Module], recomputed: bool = False) -> Stack:
    """A model of four such blocks, which backward runs again if `recomputed`."""
    torch.manual_seed(0)
    model = Stack(kind)  # type: ignore[arg-type]
    if recomputed:
        recompute_blocks(model, {f"layers.{number}": "recompute" for number in range(4)})
    return model


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in (*model.parameters(), *model.buffers()) if one.grad is not None]


@pytest.mark.parametrize(
    ("kind", "recomputes"),
    [(Replaces, True), (Makes, True), (Appends, True), (InPlace, False), (WritesParameter, False)],
)
@pytest.mark.parametrize("tiers", [False, True], ids=["recompute", "offload and recompute"])
def test_a_second_run_finds_the_attributes_of_the_first_or_there_is_none(
    kind: type[nn.Module], recomputes: bool, tiers: bool, tmp_path: Path
) -> None:
    """There is none of a block that changes a tensor of its own in place."""
    plain, model = stack(kind), stack(kind)
    offload = {"offload": {"directories": str(tmp_path), "min_bytes": "4KiB"}} if tiers else {}
    with ssdtrain.attach(model, {**LEAST, **offload}) as runtime:
        assert equal(train(plain, 2 * STEPS), train(model, 2 * STEPS))  # the first plan may be made again
        plan = auto_of(runtime).plan
    assert (plan is not None and plan.count("recompute") > 0) == recomputes
    for one, other in zip(plain.layers, model.layers, strict=True):
        if isinstance(one, Replaces | InPlace):
            assert torch.equal(one.average, other.average)
        if isinstance(one, Appends):
            assert equal(one.seen["means"], other.seen["means"]) and one.kinds == other.kinds


@pytest.mark.parametrize("buffer", [False, True])
def test_a_mask_that_is_set_before_each_microbatch_is_that_of_its_forward(buffer: bool) -> None:
    """As in a pipeline: backward of the first comes after the forward of the second."""

    class Masked(Keeps):
        def __init__(self) -> None:
            super().__init__()
            if buffer:
                self.register_buffer("mask", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh() * self.mask

    def gradients(recomputed: bool) -> list[torch.Tensor]:
        model = stack(Masked, recomputed)
        losses = []
        for number in range(2):
            for layer in model.layers:
                layer.mask = (torch.arange(64) % 2 == number).float()  # type: ignore[assignment]
            losses.append(model(torch.arange(64)[None], torch.tensor(0)))
        for loss in losses:
            loss.backward()
        return gradients_of(model)

    assert equal(gradients(False), gradients(True))


def test_weights_that_change_between_forward_and_backward_are_an_error_as_for_autograd() -> None:
    for recomputed in (False, True):
        model = stack(Keeps)
        for layer in model.layers:
            layer.forward = lambda x, of=layer.linear: of(x).tanh()  # type: ignore[method-assign, misc]
        if recomputed:
            recompute_blocks(model, {f"layers.{number}": "recompute" for number in range(4)})
        loss = model(torch.arange(64)[None], torch.tensor(0))
        with torch.no_grad():
            model.layers[2].linear.weight.mul_(2)  # type: ignore[union-attr, operator]
        text = (
            r"linear\.weight of the block 'layers\.2' was changed in place"
            if recomputed
            else "inplace operation"
        )
        with pytest.raises(RuntimeError, match=text):
            loss.backward()


class Averages(Keeps):
    """Keeps a moving average in a buffer, in place, and subtracts it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(0.1 * x.detach().flatten(0, -2).mean(0))
        return self.linear(x - self.average).tanh()


class Normalises(Keeps):
    """Its statistics move without their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("variance", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).flatten(0, -2)
        return nn.functional.batch_norm(y, self.mean, self.variance, training=True).view(x.shape).tanh()  # type: ignore[arg-type]


class Scales(Keeps):
    """Adds a buffer that others write."""

    rows = 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(self.rows, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.scale[0]).tanh()


class ScalesByLarge(Scales):
    rows = SMALL // 256 + 1


def write_scales(model: nn.Module, number: int) -> None:
    """As DistributedDataParallel before a forward."""
    for name, buffer in model.named_buffers():
        if name.endswith("scale"):
            buffer.fill_(number + 1)


@pytest.mark.parametrize("kind", [Averages, Normalises, Scales])
def test_a_second_run_finds_the_small_buffers_of_the_first_and_changes_none(
    kind: Callable[[], nn.Module],
) -> None:
    """Backward of the first microbatch comes after the forward of the second; each backward runs twice."""

    def found(recomputed: bool) -> list[torch.Tensor]:
        model = stack(kind, recomputed)
        losses = []
        for number in range(2):
            write_scales(model, number)
            losses.append(model(torch.arange(64)[None] + number, torch.tensor(0)))
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        return [*gradients_of(model), *model.buffers()]

    assert equal(found(False), found(True))


def test_a_large_buffer_that_is_written_before_backward_is_an_error_with_its_name() -> None:
    model = stack(ScalesByLarge, recomputed=True)
    loss = model(torch.arange(64)[None], torch.tensor(0))
    write_scales(model, 1)
    with pytest.raises(
        RuntimeError, match=r"scale of the block 'layers\.3' was changed in place.*broadcast_buffers"
    ):
        loss.backward()


class Learns(Keeps):
    """A buffer that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((64,), 2.0, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).tanh()


def test_a_buffer_that_requires_a_gradient_gets_it() -> None:
    def found(recomputed: bool) -> list[torch.Tensor]:
        model = stack(Learns, recomputed)
        model(torch.arange(64)[None], torch.tensor(0)).backward()
        return gradients_of(model)

    assert equal(found(False), found(True))


class Shares(Keeps):
    """One buffer is a part of another, which its forward writes; those of BatchNorm, whose versions do not move, share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.ones(64))
        self.register_buffer("head", self.whole[:1])
        both = torch.cat([torch.zeros(64), torch.ones(64)])
        self.norm = nn.BatchNorm1d(64)
        self.norm.running_mean, self.norm.running_var = both[:64], both[64:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.whole.mul_(1.5)
        return self.norm(self.linear(x * self.head).flatten(0, -2)).view_as(x).tanh()


@pytest.mark.parametrize("tried", [False, True])
def test_buffers_that_share_memory_are_those_of_the_first_run(tried: bool) -> None:
    def found(recomputed: bool) -> list[torch.Tensor]:
        model = stack(Shares, recomputed)
        # A block is tried in forward where saved-tensor hooks are around it.
        with saved_tensors_hooks(lambda one: one, lambda one: one) if tried else contextlib.nullcontext():
            loss = model(torch.arange(64)[None], torch.tensor(0))
        loss.backward()
        return [*gradients_of(model), *model.buffers()]

    assert equal(found(False), found(True))
