"""ZFP against the reference library, through its Python binding."""

import numpy as np
import pytest
import torch
import zfpy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssdtrain.codecs import HEADER_BYTES, make_codec, payload_finite
from ssdtrain.codecs.zfp_tables import plane_code, plane_of_code
from tests.codecs.common import decoded, payload, randn
from tests.support.tiers import tiered

# The binding corrupts its heap below 2.25, where the library widens the block to hold its header.
RATES = [2.25, 3, 4, 5, 6, 7.5, 8, 10, 12, 13.75, 16, 20, 24, 28, 32]
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 255, 256, 1021, 1022, 1023, 1024]  # the C code works in batches of 256
BACKENDS = ["torch", "native"]


def _smooth(n: int) -> Tensor:
    return torch.sin(torch.arange(n) / 50.0)


def _sparse(n: int) -> Tensor:
    return randn(n) * (randn(n, seed=1) > 1.3)


def _wide(n: int) -> Tensor:
    """Magnitudes from 1e-25 to 1e25, inside the range in which the library's scale factor does not overflow."""
    return randn(n) * torch.exp(8 * randn(n, seed=1)).clamp(1e-25, 1e25)


DISTRIBUTIONS = {
    "gaussian": lambda n: randn(n) * 1e-3,
    "smooth": _smooth,
    "sparse": _sparse,
    "wide": _wide,
    "bfloat16": lambda n: randn(n).bfloat16().float(),
    "integers": lambda n: randn(n).mul(10).round(),
    "constant": lambda n: torch.full((n,), -0.3),
    "zeros": lambda n: torch.zeros(n),
    "huge": lambda n: randn(n).clamp(-1, 1) * 2.0**127,
    "one in a block": lambda n: randn(n) * (torch.arange(n) % 4 == 2),
}


def theirs(x: Tensor, rate: float) -> Tensor:
    return torch.from_numpy(
        np.frombuffer(zfpy.compress_numpy(x.numpy(), rate=rate, write_header=False), np.uint8).copy()
    )


def their_decoding(stream: Tensor, numel: int, rate: float) -> Tensor:
    out = zfpy._decompress(stream.numpy(), zfpy.type_float, (numel,), None, -1, rate, -1)
    return torch.from_numpy(np.array(out).reshape(-1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rate", tiered(RATES, quick=[2.25, 8, 13.75]))
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_stream_and_its_decoding_are_those_of_the_library(
    distribution: str, rate: float, backend: str
) -> None:
    codec = make_codec(f"zfp:rate={rate}", backend=backend)
    for numel in LENGTHS:
        x = DISTRIBUTIONS[distribution](numel)
        buf = payload(codec, x)
        stream = theirs(x, rate)
        assert torch.equal(buf[HEADER_BYTES : HEADER_BYTES + stream.numel()], stream)
        assert buf.numel() - HEADER_BYTES - stream.numel() < 16
        ours = decoded(codec, buf, x)
        assert torch.equal(ours.view(torch.int32), their_decoding(stream, numel, rate).view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(
        st.one_of(
            st.just(0.0),
            st.floats(
                width=32, allow_nan=False, allow_infinity=False, max_value=2.0**127, min_value=-(2.0**127)
            ),
        ),
        min_size=1,
        max_size=40,
    ),
    rate=st.sampled_from(RATES),
)
def test_any_values_give_the_stream_of_the_library(backend: str, values: list[float], rate: float) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    x = torch.where(x.abs() < 1e-28, 0.0, x)
    codec = make_codec(f"zfp:rate={rate}", backend=backend)
    buf, stream = payload(codec, x), theirs(x, rate)
    assert torch.equal(buf[HEADER_BYTES : HEADER_BYTES + stream.numel()], stream)
    assert torch.equal(decoded(codec, buf, x), their_decoding(stream, x.numel(), rate))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=64, max_size=64), rate=st.sampled_from([r for r in RATES if r >= 4]))
def test_any_bits_decode_as_the_library_decodes_them(backend: str, data: bytes, rate: float) -> None:
    """Streams that no encoder writes, too: only the exponents are kept where both sides define the result."""
    codec = make_codec(f"zfp:rate={rate}", backend=backend)
    numel = 4 * (8 * 64 // int(4 * rate))
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    for start in range(0, numel // 4 * int(4 * rate), int(4 * rate)):
        bits[start + 7] = not bits[start + 8]  # biased exponents 64 to 191
    stream = torch.from_numpy(np.packbits(bits, bitorder="little"))
    buf = payload(codec, torch.zeros(numel))
    size = buf.numel() - HEADER_BYTES
    buf[HEADER_BYTES:] = torch.nn.functional.pad(stream, (0, 64))[:size]
    assert torch.equal(decoded(codec, buf, torch.zeros(numel)), their_decoding(stream, numel, rate))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e-40, 1e-44])
def test_tiny_blocks_keep_their_precision_where_the_library_overflows(scale: float, backend: str) -> None:
    x = randn(400) * scale
    y = make_codec("zfp:rate=32", backend=backend).roundtrip(x)
    assert (y - x).abs().max() <= max(2e-6 * scale, 2e-45)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_with_inf_or_nan_decodes_to_nan_and_the_others_as_ever(backend: str) -> None:
    codec = make_codec("zfp:rate=8", backend=backend)
    x = randn(103)
    clean = decoded(codec, payload(codec, x), x)
    for at, bad in [(5, float("inf")), (50, float("nan")), (102, -float("inf"))]:
        spoilt = x.clone()
        spoilt[at] = bad
        buf = payload(codec, spoilt)
        assert not bool(payload_finite(buf))
        y = decoded(codec, buf, x)
        inside = torch.arange(103) // 4 == at // 4
        assert torch.isnan(y[inside]).all()
        assert torch.equal(y[~inside], clean[~inside])


def test_plane_codes_invert_each_other() -> None:
    for significant in range(5):
        for plane in range(16):
            code, length, count = plane_code(significant, plane)
            if plane >> significant or significant == 4:
                assert count == max(significant, plane.bit_length())
            assert plane_of_code(significant, code, 7) == (plane, length, count)


@pytest.mark.parametrize("rate", [2, 2.3, 33])
def test_a_rate_the_format_cannot_have_is_rejected(rate: float) -> None:
    with pytest.raises(ValueError, match=r"multiple of 0.25 from 2.25 to 32"):
        make_codec(f"zfp:rate={rate}")


@pytest.mark.parametrize(("rate", "bound"), [(16, 3e-4), (12, 5e-3), (8, 0.07)])
def test_the_error_of_a_gaussian_tensor_is_what_was_measured(rate: int, bound: float) -> None:
    x = randn(1 << 14)
    error = float((make_codec(f"zfp:rate={rate}").roundtrip(x) - x).norm() / x.norm())
    assert bound / 4 < error < bound
