"""Casts and float8 blocks: everything their docstrings state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.codecs import make_codec, payload_finite
from tests.codecs.common import FLOATS, decoded, payload, randn

# Half a unit in the last place of a normal number, and the smallest step relative to the largest number, of each format.
FLOAT8 = {"e4m3": (2.0**-4, 2.0**-9 / 448), "e5m2": (2.0**-3, 2.0**-16 / 57344)}


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(
        st.one_of(
            st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127),
            st.sampled_from([0.0, 1e-45, -1e-40, 1e-30]),
        ),
        min_size=1,
        max_size=80,
    ),
    name=st.sampled_from(sorted(FLOAT8)),
    block=st.sampled_from([32, 64]),
)
def test_float8_errs_by_half_a_unit_of_the_value_or_of_the_smallest_step(
    values: list[float], name: str, block: int
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    codec = make_codec(f"fp8:format={name},block={block}")
    y = codec.roundtrip(x).double()
    unit, step = FLOAT8[name]
    largest = torch.cat([x, torch.zeros(-x.numel() % block)]).view(-1, block).abs().amax(1).double()
    scale = (largest * (1 + 2**-7)).clamp(min=2.0**-126 * torch.finfo(codec.dtype).max)
    least = (scale * step / 2).repeat_interleave(block)[: x.numel()]
    assert (
        (y - x.double()).abs() <= (unit * x.double().abs()).maximum(least) * (1 + 2**-20) + 2.0**-149
    ).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spec", ["fp8", "fp8:format=e5m2", "int8", "int4:asymmetric", "int2"])
def test_the_largest_number_of_a_dtype_stays_finite_in_it(spec: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, largest / 2, 0.0] * 40).to(dtype)
    codec = make_codec(spec)
    y = codec.roundtrip(x)
    assert bool(payload_finite(payload(codec, x)))
    assert torch.isfinite(y).all()
    assert float(y[0]) >= 0.99 * largest


@pytest.mark.parametrize("target", ["bf16", "fp16"])
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_a_cast_is_torchs_cast(target: str, source: torch.dtype) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[target]
    x = (randn(3000) * torch.exp(4 * randn(3000, seed=1))).to(source)
    codec = make_codec(target)
    assert torch.equal(decoded(codec, payload(codec, x), x, dtype), x.to(dtype))


def test_a_cast_that_overflows_says_so() -> None:
    x = torch.tensor([1.0, 70000.0, -1e30])
    buf = payload(make_codec("fp16"), x)
    assert not bool(payload_finite(buf))
    assert decoded(make_codec("fp16"), buf, x).tolist() == [1.0, float("inf"), -float("inf")]
    beyond = torch.tensor([3.4e38])
    assert not bool(payload_finite(payload(make_codec("bf16"), beyond)))


@pytest.mark.parametrize("spec", ["bf16", "int8", "int4", "int2", "fp8", "fp8:format=e5m2", "int4:hadamard"])
@pytest.mark.parametrize("shape", ["gaussian", "spike", "tails"])
def test_contractive_codecs_shorten_the_error(spec: str, shape: str) -> None:
    x = randn(4096)
    if shape == "spike":
        x = x * 1e-3
        x[::128] = 1.0
    elif shape == "tails":
        x = x * torch.exp(2 * randn(4096, seed=1))
    codec = make_codec(spec)
    assert codec.contractive
    assert (codec.roundtrip(x) - x).norm() < 0.95 * x.norm()
