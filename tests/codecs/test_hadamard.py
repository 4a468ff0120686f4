"""The rotation, and what it does to the codec behind it."""

import pytest
import torch

from ssdtrain.codecs import Key, hadamard, make_codec
from ssdtrain.codecs.hadamard import SIZES, rotate, signs
from tests.codecs.common import randn, relative_error

CPU = torch.device("cpu")


def sylvester(size: int) -> torch.Tensor:
    """The Hadamard matrix by its definition, float64 [size, size]."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


@pytest.mark.parametrize("size", SIZES)
def test_butterflies_are_the_product_with_the_matrix(size: int) -> None:
    x = randn(50, size)
    expected = x.double() @ sylvester(size) / size**0.5
    assert torch.allclose(rotate(x).double(), expected, rtol=0, atol=2e-6)
    assert torch.allclose(rotate(rotate(x)), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_signs_are_fixed_and_balanced(size: int) -> None:
    assert torch.equal(signs(size, CPU).abs(), torch.ones(size))
    assert abs(float(signs(size, CPU).sum())) <= 4 * size**0.5
    assert torch.equal(signs(size, CPU), signs(256, CPU)[:size])


def test_signs_are_copied_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy makes the host wait: after the first use neither way makes or copies them again."""
    assert signs(128, CPU) is signs(128, CPU)
    assert signs(128, torch.device("meta")) is signs(128, torch.device("meta"))
    codec = make_codec("int8:hadamard", backend="torch")
    x = randn(1 << 12)
    expected = codec.roundtrip(x)

    def made_again(size: int) -> torch.Tensor:
        raise AssertionError(f"{size} signs are made again")

    monkeypatch.setattr(hadamard, "_signs", made_again)
    assert torch.equal(codec.roundtrip(x), expected)


def test_heavy_tails_quantise_better_and_gaussians_no_worse() -> None:
    gaussian = randn(1 << 15)
    tails = gaussian * torch.exp(randn(1 << 15, seed=1))
    plain, rotated = make_codec("int4"), make_codec("int4:hadamard")
    assert relative_error(rotated, tails) < 0.75 * relative_error(plain, tails)
    assert relative_error(rotated, gaussian) < 1.1 * relative_error(plain, gaussian)


def test_a_constant_block_does_not_become_one_large_value() -> None:
    x = torch.ones(1 << 12)
    assert relative_error(make_codec("int4:hadamard"), x) < 0.15


def test_stochastic_rounding_stays_unbiased_behind_the_rotation() -> None:
    codec = make_codec("int4:block=64,round=stochastic,hadamard")
    trials, one = 4000, randn(64)
    y = codec.roundtrip(one.repeat(trials), Key(3)).view(trials, 64).double()
    standard_error = (y.var(0) / trials).sqrt()
    assert ((y.mean(0) - one.double()).abs() <= 6 * standard_error + 1e-6).all()


def test_finite_values_near_the_end_of_the_range_are_never_silently_wrong() -> None:
    codec = make_codec("int8:hadamard")
    x = torch.full((128,), 3e38) * signs(128, CPU)
    y = codec.roundtrip(x)
    assert not torch.isfinite(y).any()
