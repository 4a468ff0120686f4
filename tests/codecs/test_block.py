"""Error, bias and variance of the block codecs: everything their docstrings state."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssdtrain.codecs import Key, make_codec, payload_finite
from ssdtrain.codecs.block import IntBlock
from ssdtrain.codecs.scales import BLOCK_SIZES, LARGEST, ceil_bf16, floor_bf16
from tests.codecs.common import FLOATS, KEY, decoded, payload, randn

CODECS = [
    IntBlock(bits, block, rounding, symmetric)
    for bits, block, rounding, symmetric in itertools.product(
        (8, 4, 2), (32, 128), ("nearest", "stochastic"), (True, False)
    )
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)


def steps(codec: IntBlock, x: Tensor) -> Tensor:
    """float64 [numel]: the largest step between codes that the docstring allows for each value's block."""
    v = torch.cat([x, x[-1:].expand(-x.numel() % codec.block)]).double().view(-1, codec.block)
    low, high = v.amin(1), v.amax(1)
    if codec.symmetric:
        step, least = v.abs().amax(1) / codec.largest_code * (1 + 2**-7), 2.0**-126
    else:
        # The zero point lies up to one part in 2^7 of its size (or half a bfloat16 denormal) below the smallest value.
        step, least = (
            (high - low + low.abs() * 2**-7 + 2.0**-133) / codec.largest_code * (1 + 2**-7),
            2.0**-125,
        )
    return step.clamp(min=least).repeat_interleave(codec.block)[: x.numel()]


special = st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, -(2.0**-127), 6e-8, 1.0, -1.0, 65504.0, 3.4e38, -3.4e38]
)
values = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False), special, st.floats(-1, 1, width=32)
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any float dtype: runs of equal values (huge blocks of zeros among them) and single odd ones."""
    dtype = draw(st.sampled_from(FLOATS))
    runs = draw(st.lists(st.tuples(values, st.integers(1, 300)), min_size=1, max_size=6))
    x = torch.cat([torch.full((n,), v) for v, n in runs])
    x += randn(x.numel(), seed=draw(st.integers(0, 9))) * draw(st.sampled_from([0.0, 1e-40, 1e-3, 1.0, 1e30]))
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    assert torch.isfinite(x).all()
    return x


@settings(max_examples=150, deadline=None)
@given(x=tensors(), codec=st.sampled_from(CODECS))
def test_no_value_errs_by_more_than_its_step(x: Tensor, codec: IntBlock) -> None:
    buf = payload(codec, x)
    assert bool(payload_finite(buf))
    y = decoded(codec, buf, x, torch.float32)
    assert torch.isfinite(y).all()
    assert torch.isfinite(decoded(codec, buf, x)).all()
    share = 1.0 if codec.stochastic else 0.5
    # Division, product and sum are each rounded to float32; values next to the end of the range are clipped.
    rounding = 2.0**-21 * x.double().abs().max() + 2.0**-148
    clipped = 2.0**-7 * x.double().abs() * (x.double().abs() > 0.99 * LARGEST[x.dtype])
    assert ((y.double() - x.double()).abs() <= share * steps(codec, x) + rounding + clipped).all()


@settings(max_examples=100, deadline=None)
@given(
    x=tensors(),
    codec=st.sampled_from(CODECS),
    bad=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    where=st.integers(0, 10**6),
)
def test_a_bad_value_spoils_its_block_and_no_other(
    x: Tensor, codec: IntBlock, bad: float, where: int
) -> None:
    at = where % x.numel()
    spoilt = x.clone()
    spoilt[at] = bad
    buf = payload(codec, spoilt)
    assert not bool(payload_finite(buf))
    y, clean = decoded(codec, buf, x), decoded(codec, payload(codec, x), x)
    block = at // codec.block
    inside = torch.arange(x.numel()) // codec.block == block
    assert torch.isnan(y[inside]).all()
    # The last value fills up the last block, which it shares; all other blocks are as they were.
    assert torch.equal(y[~inside], clean[~inside])


@every_codec
def test_nearest_is_the_nearest_code(codec: IntBlock) -> None:
    if codec.stochastic:
        codec = IntBlock(codec.bits, codec.block, "nearest", codec.symmetric)
    x = randn(codec.block * 20)
    y = codec.roundtrip(x)
    for i in range(20):
        block = slice(i * codec.block, (i + 1) * codec.block)
        levels = y[block].unique()
        nearest = (x[block, None] - levels).abs().amin(1)
        assert ((x[block] - y[block]).abs() <= nearest + 1e-6).all()


@pytest.mark.parametrize("codec", [c for c in CODECS if c.stochastic], ids=lambda c: c.spec)
def test_stochastic_rounding_is_unbiased_with_the_variance_of_a_coin(codec: IntBlock) -> None:
    trials = 2000
    # Every repetition of the block has counters of its own, so one encode is `trials` independent trials.
    one = randn(codec.block, seed=3).double()
    x = one.float().repeat(trials)
    y = codec.roundtrip(x, Key(11)).view(trials, -1).double()
    buf = payload(codec, x)
    scale = float(buf[16:18].view(torch.bfloat16).double()[0])
    zero = 0.0
    if not codec.symmetric:
        zero = float(buf[16 + 2 * trials : 18 + 2 * trials].view(torch.bfloat16).double()[0])
    fraction = ((one - zero) / scale) % 1
    variance = scale**2 * fraction * (1 - fraction)
    error = y.mean(0) - one.float().double()
    # Six standard errors for each of 128 values, then the mean over all of them.
    assert (error.abs() <= 6 * (variance / trials).sqrt() + 1e-5 * scale).all()
    assert abs(float(error.mean())) <= 5 * float(variance.mean() / trials / codec.block) ** 0.5 + 1e-6
    measured = float(y.var(0).mean())
    assert measured == pytest.approx(float(variance.mean()), rel=0.05)
    assert measured <= scale**2 / 4


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_contractive_codecs_contract_in_the_worst_case(
    bits: int, block: int, symmetric: bool, rounding: str
) -> None:
    """The worst block: one value fixes the scale, all others sit where rounding errs most."""
    codec = IntBlock(bits, block, rounding, symmetric)
    worst = 0.0
    for low in (0.0, -1.0):
        for fraction in torch.linspace(0.02, 0.98, 25):
            x = torch.full((block,), float(fraction) * (1 - low) / codec.largest_code)
            if not symmetric:
                x = x * 0 + (
                    low
                    + (int(codec.largest_code * -low / (1 - low)) + float(fraction))
                    * (1 - low)
                    / codec.largest_code
                )
            x[0] = 1.0
            if low:
                x[1] = low
            many = x.repeat(50)
            worst = max(worst, float((codec.roundtrip(many, KEY) - many).norm() ** 2 / many.norm() ** 2))
    if codec.contractive:
        assert worst < 1
    elif worst < 1:
        # Not claimed where the bound does not show it; the bound must not be far off, or the claim is worthless.
        assert block * (2 / codec.largest_code) ** 2 / 4 > 0.9


def test_which_codecs_are_contractive() -> None:
    yes = [
        "int8",
        "int4",
        "int2",
        "int8:round=stochastic,block=256",
        "int4:round=stochastic",
        "int8:asymmetric",
    ]
    no = ["int4:round=stochastic,block=256", "int2:round=stochastic,block=32", "int2:asymmetric,block=32"]
    assert all(make_codec(s).contractive for s in yes)
    assert not any(make_codec(s).contractive for s in no)


@settings(max_examples=200, deadline=None)
@given(
    x=st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)
)
def test_bfloat16_bounds_enclose_and_are_tight(x: float) -> None:
    t = torch.tensor([x], dtype=torch.float32)
    low = floor_bf16(t)
    assert low <= t
    assert torch.equal(low.bfloat16().float(), low)
    up = ceil_bf16(t.abs())
    assert up >= t.abs()
    assert torch.equal(up.bfloat16().float(), up)
    step = torch.tensor([2.0**-133]).maximum(t.abs() * 2**-7)
    assert t - low <= step
    assert up - t.abs() <= step


def test_a_block_of_one_value_is_exact_where_a_scale_can_be() -> None:
    for value in (1.0, -3.0, 2.0**-100, 0.0):
        x = torch.full((64,), value)
        y = make_codec("int8:asymmetric,block=64").roundtrip(x)
        assert torch.equal(y, x)


def test_two_ranks_with_their_own_keys_err_independently() -> None:
    codec = make_codec("int4:round=stochastic")
    x = randn(1 << 15)
    errors = torch.stack([codec.roundtrip(x, Key(1, rank=r)) - x for r in range(2)])
    assert abs(float(torch.corrcoef(errors)[0, 1])) < 0.05
