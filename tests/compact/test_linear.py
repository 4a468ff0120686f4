"""The linear function against torch's own."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.codecs import Key, make_fixed_size_codec
from ssdtrain.compact.linear import compact_linear
from ssdtrain.compact.projection import Projections, layout_of
from ssdtrain.compact.saved import Projected, Quantised, SavedInput

N, n, m = 24, 128, 40


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, N // 2, n, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(m, n, dtype=dtype, generator=generator).requires_grad_()
    bias = torch.randn(m, dtype=dtype, generator=generator).requires_grad_()
    return x, weight, bias, torch.randn(2, N // 2, m, dtype=dtype, generator=generator)


@functools.cache
def projections(kind: str) -> Projections:
    return Projections(kind, 1)


def projected(
    ratio: float, kind: str = "orthonormal", step: int = 0, dtype: torch.dtype = torch.float64
) -> Projected:
    like = torch.zeros(0, dtype=dtype)
    return Projected(projections(kind).block(layout_of(n, ratio), 5, step, like))


def quantised(codec: str, x: Tensor, step: int = 0) -> Quantised:
    return Quantised(make_fixed_size_codec(codec), Key(0, step, 3), x.shape, x.dtype)


def gradients(saved_input: SavedInput, transposed: bool = False) -> tuple[Tensor, ...]:
    x, weight, bias, upstream = operands()
    w = weight.t().contiguous().detach().requires_grad_() if transposed else weight
    y = compact_linear(x, w, bias, saved_input, saved_input.compress(x.detach()), transposed=transposed)
    found = torch.autograd.grad(y, (x, w, bias), upstream)
    return (y, found[0], found[1].t() if transposed else found[1], found[2])


def plain() -> tuple[Tensor, ...]:
    x, weight, bias, upstream = operands()
    y = F.linear(x, weight, bias)
    return (y, *torch.autograd.grad(y, (x, weight, bias), upstream))


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_output_input_gradient_and_bias_gradient_are_exact(transposed: bool) -> None:
    expected = plain()
    x = operands()[0]
    for saved_input in (projected(0.25), quantised("int4:round=stochastic", x)):
        found = gradients(saved_input, transposed)
        for index in (0, 1, 3):
            assert torch.equal(found[index], expected[index]) or torch.allclose(
                found[index], expected[index], rtol=1e-13, atol=1e-13
            )
        assert not torch.allclose(found[2], expected[2], rtol=1e-3)


@pytest.mark.parametrize("kind", ["orthonormal", "hadamard"])
def test_all_features_kept_give_the_full_gradient(kind: str) -> None:
    found, expected = gradients(projected(1.0, kind)), plain()
    assert float((found[2] - expected[2]).abs().max() / expected[2].abs().max()) < 1e-12


@pytest.mark.parametrize("mode", ["orthonormal", "gaussian", "hadamard", "int8", "int4", "int2"])
def test_the_weight_gradient_is_unbiased(mode: str) -> None:
    expected = plain()[2]
    x = operands()[0]
    count = 300
    total, variance = torch.zeros_like(expected), 0.0
    for step in range(count):
        saved_input: SavedInput
        if mode.startswith("int"):
            saved_input = quantised(f"{mode}:round=stochastic", x, step)
        else:
            saved_input = projected(0.25, mode, step)
        found = gradients(saved_input)[2]
        total += found
        variance += float((found - expected).pow(2).sum()) / count
    bias = float((total / count - expected).norm())
    assert bias < 1.2 * math.sqrt(variance / count)


def test_autocast_saves_the_weight_itself_and_gives_gradients_of_its_dtype() -> None:
    x, weight, bias, _ = operands(torch.float32)
    saved_input = projected(1.0, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        low = x.to(torch.bfloat16)
        y = compact_linear(low, weight, bias, saved_input, saved_input.compress(low.detach()))
        expected = F.linear(x, weight, bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    assert y.grad_fn.saved_tensors[1] is weight
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_only_the_compressed_input_is_saved() -> None:
    x, weight, bias, _ = operands(torch.float32)
    saved: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(tuple(t.shape))
        return t

    saved_input = projected(0.25, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compact_linear(x, weight, bias, saved_input, saved_input.compress(x.detach()))
    assert saved == [(2, N // 2, n // 4), (m, n), (64, 16)]  # and the block of P, which layers hold anyway


def test_a_graph_older_than_the_step_keeps_its_own_projection() -> None:
    first, second = projected(0.25, step=0), projected(0.25, step=1)
    x, weight, bias, upstream = operands()
    old = compact_linear(x, weight, bias, first, first.compress(x.detach()))
    compact_linear(x, weight, bias, second, second.compress(x.detach()))
    (found,) = torch.autograd.grad(old, (weight,), upstream)
    assert torch.equal(found, gradients(first)[2])
