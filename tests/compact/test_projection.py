"""Projections: what E[P P^T] = I and the variance of an estimate are, and what a projection depends on."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtrain.compact.projection import Projections, layer_key, layout_of, project, unproject

LIKE = torch.zeros(0, dtype=torch.float64)
KINDS = ("orthonormal", "gaussian", "hadamard")


def estimates(kind: str, ratio: float, x: Tensor, count: int) -> Tensor:
    """x P P^T for `count` steps, [count, n]."""
    projections = Projections(kind, seed=3)
    layout = layout_of(x.numel(), ratio)
    found = []
    for step in range(count):
        block = projections.block(layout, layer_key("layer"), step, LIKE)
        found.append(unproject(project(x, block), block))
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "ratio", "count"), [(64, 0.25, 1600), (64, 0.5, 1600), (256, 0.25, 800)])
def test_mean_and_variance_are_those_of_the_formulas(kind: str, n: int, ratio: float, count: int) -> None:
    """In blocks of 64 features: the paper's (n + 1) / r for one of them, and n / r - 1 for orthonormal columns."""
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = estimates(kind, ratio, x, count)
    variance = 65 / (64 * ratio) if kind == "gaussian" else 1 / ratio - 1
    errors = (found - x).pow(2).sum(1) / x.pow(2).sum()
    standard_error = float(errors.std()) / math.sqrt(count)
    assert float(errors.mean()) == pytest.approx(variance, abs=4 * standard_error + 1e-12)
    bias = (found.mean(0) - x).norm() / x.norm()
    assert float(bias) < 1.3 * math.sqrt(variance / count)


@pytest.mark.parametrize("kind", ["orthonormal", "hadamard"])
def test_columns_are_orthogonal(kind: str) -> None:
    block = Projections(kind, seed=0).block(layout_of(192, 0.25), 7, 5, LIKE)
    assert block.shape == (64, 16)
    assert torch.allclose(block.t() @ block, 4 * torch.eye(16, dtype=torch.float64), atol=1e-12)


def test_a_gaussian_block_is_what_numpy_makes_of_the_same_counters() -> None:
    """An independent Philox4x32-10 and Box-Muller: pins seed, layer, step and their places in the key."""
    seed, layer, step = (5 << 32) + 9, layer_key("decoder.layers.3.mlp"), 21
    layout = layout_of(64, 0.25)
    words = numpy.stack([_philox(i, step, layer, 0, seed) for i in range(64 * 16 // 4)], axis=1)
    uniform = (words.astype(numpy.float64) + 0.5) * 2.0**-32
    normal = [
        numpy.sqrt(-2 * numpy.log(uniform[a])) * wave(2 * numpy.pi * uniform[a + 1])
        for a in (0, 2)
        for wave in (numpy.cos, numpy.sin)
    ]
    expected = numpy.concatenate(normal).reshape(64, 16) / 4
    found = Projections("gaussian", seed).block(layout, layer, step, LIKE)
    assert numpy.abs(found.numpy() - expected).max() < 1e-12


def _philox(c0: int, c1: int, c2: int, c3: int, seed: int) -> list[int]:
    k0, k1, mask = seed & 0xFFFFFFFF, seed >> 32, 0xFFFFFFFF
    for _ in range(10):
        p0, p2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p2 >> 32) ^ c1 ^ k0, p2 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("kind", KINDS)
def test_seed_layer_and_step_each_change_the_projection_and_nothing_else_does(kind: str) -> None:
    layout = layout_of(128, 0.25)

    def made(seed: int, name: str, step: int) -> Tensor:
        return Projections(kind, seed).block(layout, layer_key(name), step, LIKE)

    base = made(1, "a", 2)
    torch.manual_seed(99)
    one = Projections(kind, 1)
    for step in (40, 3, 2):  # in any order, past the end of a series
        one.block(layout, layer_key("a"), step, LIKE)
    assert torch.equal(base, one.block(layout, layer_key("a"), 2, LIKE))
    for other in (
        made(2, "a", 2),
        made(1 + (1 << 40), "a", 2),
        made(1, "b", 2),
        made(1, "a", 3),
        made(1, "a", 18),
    ):
        assert not torch.allclose(base, other)


def test_a_projection_serves_update_every_steps() -> None:
    projections = Projections("orthonormal", 0, every=50)
    layout = layout_of(64, 0.5)
    found = [projections.block(layout, 1, step, LIKE) for step in (0, 49, 50, 99)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert not torch.allclose(found[1], found[2])


def test_projections_of_many_steps_are_copied_to_a_device_together() -> None:
    """Each copy of pageable memory lets the host wait for what the device was given: one for each layer and step would leave it
    idle at each layer."""
    copies: list[str] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_to_copy" in str(func) and (kwargs or {}).get("device") == torch.device("meta"):
                copies.append(str(func))
            return func(*args, **(kwargs or {}))

    projections, layout = Projections("orthonormal", 0), layout_of(64, 0.25)
    with Copies():
        for step in range(48):
            block = projections.block(layout, 1, step, torch.empty(0, device="meta", dtype=torch.bfloat16))
            assert block.shape == (64, 16) and block.dtype == torch.bfloat16
    assert len(copies) == 3


def test_no_global_generator_is_drawn_from() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for kind in KINDS:
        Projections(kind, 1).block(layout_of(64, 0.25), 1, 1, LIKE)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("width", "block"), [(4096, 64), (1376, 32), (344, 43), (96, 32), (48, 16), (10, 10), (1009, 1009)]
)
def test_blocks_divide_the_width(width: int, block: int) -> None:
    layout = layout_of(width, 0.25)
    assert layout.block == block and layout.compressed == width // block * layout.kept
    assert layout.compressed / width == pytest.approx(0.25, abs=0.5 / block)


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.01])
def test_a_ratio_out_of_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        layout_of(64, ratio)


def test_hadamard_needs_blocks_of_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="width 344 has blocks of 43"):
        Projections("hadamard", 0).check(layout_of(344, 0.25))


def test_a_shard_of_the_input_has_its_part_of_the_projection() -> None:
    """Row-parallel layers: z of the shards, side by side, is z of the whole."""
    x = torch.randn(3, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    projections = Projections("orthonormal", 4)
    whole = projections.block(layout_of(256, 0.25), 9, 1, LIKE)
    parts = [
        project(shard, projections.block(layout_of(128, 0.25), 9, 1, LIKE)) for shard in x.chunk(2, dim=1)
    ]
    assert torch.allclose(torch.cat(parts, dim=1), project(x, whole), rtol=1e-13, atol=1e-13)
