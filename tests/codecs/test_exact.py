"""Codec exact: every bit comes back at a size known before the call, or the overflow flag says that it does not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssdtrain.codecs import (
    ExactCodec,
    FixedSizeCodec,
    PayloadError,
    PayloadOverflow,
    make_codec,
    payload_finite,
)
from ssdtrain.codecs.base import HEADER_BYTES, PAYLOAD_DTYPES
from ssdtrain.codecs.exact import BLOCK, BLOCKS, EXCEPTION, FAR_NIBBLE, GROUP, POOL_BYTES, Exact
from tests.codecs.common import decoded, payload, randn
from tests.codecs.test_lossless import same_bits

BACKENDS = ("torch", "auto")
CODED = (torch.bfloat16, torch.float32)
SUPERBLOCK = BLOCK * BLOCKS
every_backend = pytest.mark.parametrize("codec", [Exact(backend) for backend in BACKENDS], ids=BACKENDS)
every_coded = pytest.mark.parametrize("dtype", CODED, ids=str)


def with_exponents(exponents: Tensor, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values of random signs and mantissas with these biased exponents (bfloat16 and float32 share them)."""
    bits = torch.randint(0, 1 << 31, exponents.shape, generator=torch.Generator().manual_seed(seed))
    bits = bits << 1 & 0x807FFFFF | exponents.to(torch.int64) << 23
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return bits.view(torch.float32) if dtype == torch.float32 else (bits >> 16).to(torch.int16).view(dtype)


def with_exceptions(near: int, dtype: torch.dtype, seed: int = 0, far: int = 0) -> Tensor:
    """A superblock with so many exceptions at random places but the first of each block, which has the largest exponent: up to 28
    binades below it, which take half a byte each, and further away, which take one more."""
    exponents = torch.full((SUPERBLOCK,), 120)
    places = torch.randperm(SUPERBLOCK, generator=torch.Generator().manual_seed(seed))
    places = places[places % BLOCK != 0]
    exponents[places[:near]] = 120 - EXCEPTION - torch.arange(near) % FAR_NIBBLE
    exponents[places[near : near + far]] = 30 + torch.arange(far) % 60
    return with_exponents(exponents, dtype, seed)


def overflows(codec: ExactCodec, buf: Tensor) -> bool:
    return bool(codec.overflow_flag(buf))


@every_backend
@every_coded
@pytest.mark.parametrize(
    "numel",
    [
        0,
        1,
        2,
        511,
        512,
        513,
        1024,
        SUPERBLOCK - 1,
        SUPERBLOCK,
        SUPERBLOCK + 700,
        3 * SUPERBLOCK,
        260 * SUPERBLOCK + 5000,
    ],
)
def test_any_length_comes_back_in_the_stated_bytes(codec: Exact, dtype: torch.dtype, numel: int) -> None:
    x = (randn(numel) * 0.02).to(dtype)
    buf = payload(codec, x)
    assert buf.numel() == codec.payload_bytes(numel, dtype)
    assert not overflows(codec, buf)
    assert same_bits(decoded(codec, buf, x), x)


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.766), (torch.float32, 0.883)], ids=str)
def test_a_large_tensor_takes_what_is_promised(dtype: torch.dtype, share: float) -> None:
    numel = 1 << 20
    assert make_codec("exact").max_payload_bytes(numel, dtype) <= share * numel * dtype.itemsize


@pytest.mark.parametrize("dtype", [d for d in PAYLOAD_DTYPES if d not in CODED], ids=str)
def test_other_dtypes_are_copied_and_never_overflow(dtype: torch.dtype) -> None:
    codec = Exact()
    raw = torch.randint(0, 256, (1 << 12,), generator=torch.Generator().manual_seed(0))
    x = (raw % 2 if dtype == torch.bool else raw).to(torch.uint8).view(dtype)
    buf = payload(codec, x)
    assert buf.numel() == 16 + x.nbytes
    assert not overflows(codec, buf)
    assert same_bits(decoded(codec, buf, x), x)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_comes_back(codec: Exact, dtype: torch.dtype) -> None:
    """All 65,536, a few to a superblock, among values whose exponents lie together."""
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    patterns = patterns[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    at_once = 100
    for seed, some in enumerate(patterns.split(8 * at_once)):
        parts = [randn(SUPERBLOCK, seed=seed).to(dtype).view(torch.int16) for _ in some.split(at_once)]
        place = torch.randperm(SUPERBLOCK, generator=torch.Generator().manual_seed(seed))[:at_once]
        for part, values in zip(parts, some.split(at_once), strict=True):
            part[place[: values.numel()]] = values
        x = torch.cat(parts).view(dtype)
        buf = payload(codec, x)
        assert not overflows(codec, buf)
        assert bool(payload_finite(buf)) == bool(torch.isfinite(x).all())
        assert same_bits(decoded(codec, buf, x), x)


@every_backend
@every_coded
def test_random_bits_overflow_or_come_back(codec: Exact, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (4 * SUPERBLOCK,), generator=torch.Generator().manual_seed(0))
    x = raw.to(torch.uint8).view(dtype)
    buf = payload(codec, x)
    assert overflows(codec, buf)
    assert bool(payload_finite(buf)) == bool(torch.isfinite(x).all()), "the finite flag is right all the same"
    with pytest.raises(PayloadOverflow, match=f"{x.numel()} values.*overflow_flag"):
        decoded(codec, buf, x)


@every_backend
@every_coded
@pytest.mark.parametrize("superblocks", [1, 3])
@pytest.mark.parametrize(
    ("near", "far", "fits"),
    [
        (2 * POOL_BYTES - 1, 0, True),
        (2 * POOL_BYTES, 0, True),
        (2 * POOL_BYTES + 1, 0, False),
        (2, 234, True),
        (3, 234, False),
        (2, 235, False),
    ],
)
def test_a_pool_is_used_to_its_last_byte(
    codec: Exact, dtype: torch.dtype, superblocks: int, near: int, far: int, fits: bool
) -> None:
    parts = [with_exceptions(0, dtype, seed=i) for i in range(superblocks)]
    parts[-1] = with_exceptions(near, dtype, far=far)
    x = torch.cat(parts)
    buf = payload(codec, x)
    assert overflows(codec, buf) != fits
    if fits:
        assert same_bits(decoded(codec, buf, x), x)


@every_backend
def test_all_exceptions_of_one_block_fit_if_there_are_no_others(codec: Exact) -> None:
    """A short superblock has the whole pool."""
    exponents = torch.full((GROUP,), 100)
    exponents[1:BLOCK] = torch.arange(1, BLOCK) % 80 + 1
    x = with_exponents(exponents, torch.bfloat16)
    buf = payload(codec, x)
    assert not overflows(codec, buf)
    assert same_bits(decoded(codec, buf, x), x)


@every_backend
@every_coded
@pytest.mark.parametrize("outlier", [3e4, float("inf"), -float("nan")])
def test_a_few_huge_values_do_not_make_exceptions_of_their_blocks(
    codec: Exact, dtype: torch.dtype, outlier: float
) -> None:
    """Large models have some in each sequence, as have gradients when a loss scale overflows."""
    x = (randn(2 * SUPERBLOCK) * 0.3).to(dtype)
    x[torch.arange(x.numel()) % 400 == 3] = outlier
    buf = payload(codec, x)
    assert not overflows(codec, buf)
    assert same_bits(decoded(codec, buf, x), x)


def _gated() -> Tensor:
    gate, value = randn(1 << 18), randn(1 << 18, seed=1)
    return torch.cat([torch.nn.functional.silu(scale * gate) * value for scale in (0.05, 1.0, 2.0)])


WIDE = {
    "gated": _gated(),
    "squared": torch.relu(randn(1 << 18)) ** 2,
    "gelu": torch.nn.functional.gelu(randn(1 << 18)),
    "gelu of large inputs": torch.nn.functional.gelu(3 * randn(1 << 18)),
    "rows": (randn(1024, 384) * 2.0 ** (6 * randn(1024, 1, seed=1))).flatten(),
}
"""Values whose exponents are far apart: of feed-forward layers, and of gradients whose rows differ by their experts' use."""


@pytest.mark.parametrize("name", WIDE)
@every_coded
def test_what_training_saves_fits(name: str, dtype: torch.dtype) -> None:
    x = WIDE[name].to(dtype)
    buf = payload(Exact(), x)
    assert not overflows(Exact(), buf)
    assert same_bits(decoded(Exact(), buf, x), x)


@every_backend
@every_coded
def test_negative_values_may_be_far_below_positive_ones(codec: Exact, dtype: torch.dtype) -> None:
    """Their codes begin where their exponents do."""
    place = torch.arange(SUPERBLOCK)
    below, above = (with_exponents(e, dtype).abs() for e in (60 + place % 13, 75 + place % 3))
    x = torch.where(place % 3 == 0, above, -below)
    buf = payload(codec, x)
    assert not overflows(codec, buf)
    assert same_bits(decoded(codec, buf, x), x)
    assert overflows(codec, payload(codec, torch.where(place % 3 == 0, above, below)))


@every_backend
@every_coded
@pytest.mark.parametrize("base", [0, 1, 5, 13, 14, 15, 27, 254, 255])
def test_blocks_near_the_ends_of_the_exponents(codec: Exact, dtype: torch.dtype, base: int) -> None:
    """Denormals, and Inf and NaN beside huge values."""
    exponents = (base - torch.arange(SUPERBLOCK) % 14).clamp(min=0)
    x = with_exponents(exponents, dtype)
    buf = payload(codec, x)
    assert not overflows(codec, buf)
    assert same_bits(decoded(codec, buf, x), x)


@every_backend
@every_coded
def test_zeros_cost_nothing(codec: Exact, dtype: torch.dtype) -> None:
    """Rows of an embedding without a gradient, and dropped values: +0.0 and -0.0 beside any others."""
    x = (randn(4 * SUPERBLOCK) * 1e-3).to(dtype)
    x.view(-1, 64)[::3] = 0
    x[torch.arange(x.numel()) % 7 == 0] = -0.0
    buf = payload(codec, x)
    assert not overflows(codec, buf)
    assert same_bits(decoded(codec, buf, x), x)


@settings(max_examples=100, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 255), st.integers(1, 700)), min_size=1, max_size=30),
    dtype=st.sampled_from(CODED),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 5),
)
def test_any_exponents_come_back_or_overflow(
    runs: list[tuple[int, int]], dtype: torch.dtype, backend: str, seed: int
) -> None:
    codec = Exact(backend)
    x = with_exponents(torch.cat([torch.full((n,), e) for e, n in runs]), dtype, seed)
    buf = payload(codec, x)
    assert torch.equal(buf, payload(codec, x, dirty=0x3C)), (
        "every byte is written, also of a payload that overflows"
    )
    assert bool(payload_finite(buf)) == bool(torch.isfinite(x).all())
    if overflows(codec, buf):
        with pytest.raises(PayloadOverflow):
            decoded(codec, buf, x)
    else:
        assert same_bits(decoded(codec, buf, x), x)


@settings(max_examples=100, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 255), st.integers(1, 900)), min_size=1, max_size=40),
    repeat=st.sampled_from([1, 8]),
    noise=st.sampled_from([0, 3, 20]),
    dtype=st.sampled_from(CODED),
)
def test_c_writes_the_bytes_of_the_reference(
    runs: list[tuple[int, int]], repeat: int, noise: int, dtype: torch.dtype
) -> None:
    exponents = torch.cat([torch.full((n,), e) for e, n in runs]).repeat(repeat)
    spread = torch.randint(0, noise + 1, exponents.shape, generator=torch.Generator().manual_seed(0))
    x = with_exponents((exponents - spread).clamp(min=0), dtype)
    assert torch.equal(payload(Exact("native"), x), payload(Exact("torch"), x))


def test_the_flag_is_a_view_that_needs_no_copy() -> None:
    buf = payload(Exact(), torch.zeros(1000))
    flag = Exact().overflow_flag(buf)
    assert flag.dtype == torch.uint8
    assert flag.shape == (1,)
    assert flag.untyped_storage().data_ptr() == buf.untyped_storage().data_ptr()
    assert isinstance(Exact(), FixedSizeCodec)


@pytest.mark.parametrize("spec", ["raw", "exact", "lossless", "mask", "int8"])
def test_only_exact_may_overflow(spec: str) -> None:
    assert make_codec(spec).may_overflow == (spec == "exact")


def test_a_payload_of_another_dtype_is_an_error() -> None:
    x = randn(2000).bfloat16()
    with pytest.raises(ValueError, match="needs"):
        decoded(Exact(), payload(Exact(), x), x, torch.float32)
    with pytest.raises(PayloadError, match="float16"):
        decoded(
            Exact(), torch.cat([payload(Exact(), x), torch.zeros(2000, dtype=torch.uint8)]), x, torch.float16
        )


@every_backend
@every_coded
@pytest.mark.parametrize("numel", [512, 16384, 16384 + 3 * 512 + 5])
def test_damaged_bytes_are_decoded_into_the_tensor_alone(
    codec: Exact, dtype: torch.dtype, numel: int
) -> None:
    """A checksum finds them where they were stored; here nothing else is read as an index without a bound."""
    header = payload(codec, torch.zeros(numel, dtype=dtype))[:HEADER_BYTES]
    for seed in range(6):
        buf = torch.randint(
            0, 256, (codec.payload_bytes(numel, dtype),), generator=torch.Generator().manual_seed(seed)
        )
        buf = buf.to(torch.uint8)
        buf[:HEADER_BYTES] = header
        if seed % 2:
            buf[HEADER_BYTES + 512 :] = 0xEE  # exceptions everywhere
        memory = torch.zeros(numel + 4096, dtype=dtype)
        codec.decode(buf, memory[2048 : 2048 + numel])
        assert not (memory[:2048].any() or memory[2048 + numel :].any())
