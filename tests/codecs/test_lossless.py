"""Codecs that give back every bit: of any dtype, and of masks."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssdtrain.codecs import (
    PAYLOAD_ALIGNMENT,
    FixedSizeCodec,
    PayloadError,
    VariableSizeCodec,
    make_codec,
    make_fixed_size_codec,
    payload_finite,
)
from ssdtrain.codecs.base import PAYLOAD_DTYPES
from tests.codecs.common import FLOATS, decoded, payload, randn

LOSSLESS = make_codec("lossless")
MASKS = [make_codec("mask", "torch"), make_codec("mask:sparse", "torch")]
every_mask = pytest.mark.parametrize("codec", MASKS, ids=lambda c: c.spec)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=600),
    dtype=st.sampled_from([d for d in PAYLOAD_DTYPES if d != torch.bool]),
    repeat=st.sampled_from([1, 50]),
)
def test_any_bits_of_any_dtype_come_back(data: bytes, dtype: torch.dtype, repeat: int) -> None:
    data = data[: len(data) // dtype.itemsize * dtype.itemsize] * repeat
    x = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        if data
        else torch.empty(0, dtype=dtype)
    )
    buf = payload(LOSSLESS, x)
    assert buf.numel() % PAYLOAD_ALIGNMENT == 0
    assert buf.numel() <= LOSSLESS.max_payload_bytes(x.numel(), dtype)
    assert same_bits(LOSSLESS.decode(buf, torch.empty_like(x)), x)


@pytest.mark.parametrize(
    ("dtype", "ratio"), [(torch.float32, 1.14), (torch.bfloat16, 1.4), (torch.float16, 1.05)]
)
def test_floats_shrink_as_their_exponents_allow(dtype: torch.dtype, ratio: float) -> None:
    x = (randn(1 << 19) * 0.02).to(dtype)
    buf = payload(LOSSLESS, x)
    assert same_bits(LOSSLESS.decode(buf, torch.empty_like(x)), x)
    assert x.nbytes / buf.numel() > ratio


def test_noise_costs_no_more_than_the_tables() -> None:
    x = torch.randint(0, 256, (1 << 19,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert payload(LOSSLESS, x).numel() <= x.numel() + 64


def test_strided_input_and_output() -> None:
    x = randn(40, 60).t()
    out = torch.empty(40, 60).t()
    LOSSLESS.decode(payload(LOSSLESS, x), out)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_the_finite_flag_is_kept_with_the_bits(dtype: torch.dtype, bad: float) -> None:
    x = randn(5000, dtype=dtype)
    assert bool(payload_finite(payload(LOSSLESS, x)))
    x[77] = bad
    buf = payload(LOSSLESS, x)
    assert not bool(payload_finite(buf))
    assert same_bits(decoded(LOSSLESS, buf, x), x)


def test_accumulate() -> None:
    x, out = randn(5000), randn(5000, seed=1)
    expected = out + x
    assert torch.equal(LOSSLESS.decode(payload(LOSSLESS, x), out, accumulate=True), expected)


def test_a_payload_whose_structure_is_damaged_is_an_error() -> None:
    x = torch.zeros(5000)
    buf = payload(LOSSLESS, x)
    with pytest.raises(PayloadError, match=r"damaged|decompresses"):
        broken = buf.clone()
        broken[48:] ^= 0xFF
        LOSSLESS.decode(broken, torch.empty(5000))
    with pytest.raises(PayloadError, match="do not fit"):
        LOSSLESS.decode(buf[: buf.numel() - 16].clone(), torch.empty(5000))
    with pytest.raises(PayloadError, match="ends within"):
        LOSSLESS.decode(buf[:32].clone(), torch.empty(5000))
    with pytest.raises(PayloadError, match="int32"):
        LOSSLESS.decode(payload(LOSSLESS, x.int()), torch.empty(5000))


def test_its_size_depends_on_the_data_and_a_collective_is_rejected() -> None:
    assert isinstance(LOSSLESS, VariableSizeCodec)
    for spec in ("lossless", "mask:sparse"):
        with pytest.raises(ValueError, match="depends on the data"):
            make_fixed_size_codec(spec)


def test_threads_share_one_codec() -> None:
    xs = [randn(60_000, seed=i).bfloat16() for i in range(4)]
    ok: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda x=x: ok.append(all(same_bits(LOSSLESS.roundtrip(x), x) for _ in range(5)))
        )
        for x in xs
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert ok == [True] * 4


@every_mask
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 127, 128, 1000, 4099])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_masks_come_back(codec: FixedSizeCodec, numel: int, density: float) -> None:
    x = torch.rand(numel, generator=torch.Generator().manual_seed(1)) < density
    buf = payload(codec, x)
    assert bool(payload_finite(buf))
    assert torch.equal(codec.decode(buf, torch.ones_like(x)), x)


def test_a_mask_takes_an_eighth_and_a_sparse_one_less() -> None:
    x = torch.zeros(1 << 16, dtype=torch.bool)
    x[::1000] = True
    dense, sparse = (payload(codec, x).numel() for codec in MASKS)
    assert dense == (1 << 13) + 16
    assert sparse == 32 + 4 * 66 + 8
    x[::2] = True
    assert payload(MASKS[1], x).numel() == dense + 16


@every_mask
def test_masks_take_strided_bool_and_nothing_else(codec: FixedSizeCodec) -> None:
    x = (randn(30, 41) > 0).t()
    assert torch.equal(codec.roundtrip(x), x)
    with pytest.raises(TypeError, match="bool"):
        payload(codec, x.to(torch.uint8))


def test_a_cut_sparse_mask_is_an_error() -> None:
    x = torch.zeros(4096, dtype=torch.bool)
    x[:20] = True
    with pytest.raises(PayloadError, match="20 positions"):
        MASKS[1].decode(payload(MASKS[1], x)[:64].clone(), torch.empty_like(x))


@pytest.mark.parametrize("position", [-5, 4096, 1 << 30])
def test_a_sparse_mask_of_positions_that_do_not_exist_is_an_error(position: int) -> None:
    x = torch.zeros(4096, dtype=torch.bool)
    x[:20] = True
    buf = payload(MASKS[1], x)
    buf[36:40].view(torch.int32).fill_(position)
    with pytest.raises(PayloadError, match="outside of 4096 values"):
        MASKS[1].decode(buf, torch.empty_like(x))


@every_mask
def test_a_header_with_a_dtype_that_does_not_exist_is_an_error(codec: FixedSizeCodec) -> None:
    x = randn(100) > 0
    buf = payload(codec, x)
    buf[2] = 200
    with pytest.raises(PayloadError, match="names the dtype 200"):
        codec.decode(buf, torch.empty_like(x))
