"""Norms in Python of models in half precision: their float32 input is saved in half precision, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from benchmarks.compact_memory import Alive
from ssdtrain.compact import recompute as copies
from ssdtrain.runtime import Runtime
from tests.support.tensors import equal_by_name

TOKENS, WIDTH = 16, 64
FLOAT32 = TOKENS * WIDTH * 4
HALF = TOKENS * WIDTH * 2


class CastBeforeWeight(nn.Module):
    """As Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.written: Callable[[Tensor], object] = lambda x_float32: None
        self.written_after: Callable[[Tensor], object] = lambda x_float32: None

    def forward(self, x: Tensor) -> Tensor:
        x_float32 = x.to(torch.float32)
        with torch.no_grad():
            self.written(x_float32.detach())
        normalised = x_float32 * torch.rsqrt(x_float32.pow(2).mean(-1, keepdim=True) + 1e-6)
        with torch.no_grad():
            self.written_after(x_float32.detach())
        return self.weight * normalised.to(x.dtype)


class CastAfterWeight(CastBeforeWeight):
    """As Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        x_float32 = x.float()
        normalised = x_float32 * torch.rsqrt(x_float32.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normalised * (1.0 + self.weight.float())).type_as(x)


class Model(nn.Module):
    def __init__(self, norm: type[CastBeforeWeight], dtype: torch.dtype, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = norm()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.to(dtype)
        self.norm.requires_grad_(not frozen)
        self.second.requires_grad_(not frozen)
        self.third.requires_grad_(not frozen)
        self.x = torch.randn(TOKENS, WIDTH).to(dtype)

    def forward(self) -> Tensor:
        normalised = self.norm(self.first(self.x))
        return self.second(normalised) + self.third(normalised)


def attach(model: nn.Module, recompute: bool) -> Runtime:
    section = {"ratio": 0.25, "recompute": recompute, "exclude": ["first"]}
    return ssdtrain.attach(model, {"compact": section, "report": {"interval": 0}})


def run(model: Model, recompute: bool) -> tuple[dict[str, Tensor], int, int]:
    """Gradients, bytes alive after the forward, and bytes that the runtime says were released."""
    model.zero_grad()
    with attach(model, recompute) as runtime:
        with Alive(model) as alive:
            loss = model().float().square().sum()
        found = alive.nbytes()
        loss.backward()
        released = runtime.compact.compression.counted.released_bytes
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients, found, released


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("norm", "normalised"), [(CastBeforeWeight, HALF), (CastAfterWeight, FLOAT32)], ids=["before", "after"]
)
def test_the_float32_input_is_saved_in_half_precision(
    norm: type[CastBeforeWeight], normalised: int, frozen: bool, dtype: torch.dtype
) -> None:
    model = Model(norm, dtype, frozen)
    expected, kept, none_released = run(model, recompute=False)
    found, less, released = run(model, recompute=True)
    assert equal_by_name(found, expected)
    assert none_released == 0
    assert released == FLOAT32 - HALF + (0 if frozen else normalised)
    assert kept - less == released


def test_a_norm_in_float32_keeps_its_input() -> None:
    model = Model(CastBeforeWeight, torch.float32, frozen=True)
    expected, kept, _ = run(model, recompute=False)
    found, less, released = run(model, recompute=True)
    assert equal_by_name(found, expected)
    assert released == 0
    assert kept == less


@pytest.mark.parametrize("seen", [True, False], ids=["its version moves", "through .data"])
def test_a_float32_input_that_was_written_to_is_kept_whole(seen: bool) -> None:
    """Its values are no longer those of the half-precision tensor."""
    model = Model(CastBeforeWeight, torch.bfloat16, frozen=False)
    model.norm.written = lambda x_float32: (x_float32 if seen else x_float32.data).mul_(1 + 2**-15)
    expected, _, _ = run(model, recompute=False)
    found, _, released = run(model, recompute=True)
    assert equal_by_name(found, expected)
    assert released == HALF  # the normalised input alone


@pytest.mark.parametrize("recompute", [False, True])
def test_a_float32_input_that_is_written_to_after_the_norm_is_an_error(recompute: bool) -> None:
    model = Model(CastBeforeWeight, torch.bfloat16, frozen=True)
    kept: list[Tensor] = []
    model.norm.written_after = kept.append
    with attach(model, recompute):
        loss = model().float().square().sum()
        kept[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_write_between_the_norm_and_the_layer_is_an_error(recompute: bool, frozen: bool) -> None:
    model = Model(CastBeforeWeight, torch.bfloat16, frozen)
    model.norm.written_after = lambda x_float32: x_float32.mul_(2)
    with attach(model, recompute):
        loss = model().float().square().sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_lack_of_memory_in_a_hook_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduced(self: copies._Narrow, saved: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(copies._Narrow, "reduced", reduced)
    model = Model(CastBeforeWeight, torch.bfloat16, frozen=True)
    with attach(model, True), pytest.raises(torch.OutOfMemoryError):
        model()
