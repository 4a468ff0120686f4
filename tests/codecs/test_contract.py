"""What holds for every codec of floating-point tensors."""

import threading

import pytest
import torch

from ssdtrain.codecs import (
    HEADER_BYTES,
    PAYLOAD_ALIGNMENT,
    Codec,
    FixedSizeCodec,
    Key,
    PayloadError,
    available,
    make_codec,
    payload_finite,
)
from tests.codecs.common import FLOATS, KEY, decoded, payload, randn

SPECS = [
    "raw",
    "exact",
    "bf16",
    "fp16",
    "int8",
    "int8:block=32,round=stochastic",
    "int4:block=64",
    "int4:block=256,asymmetric",
    "int4:block=64,round=stochastic,hadamard",
    "int2:block=32,asymmetric,round=stochastic",
    "int2",
    "fp8",
    "fp8:format=e5m2,block=64,hadamard=32",
    "bf16:hadamard",
    "zfp",
    "zfp:rate=13.75",
]
OTHERS = {"lossless", "mask"}
"""Codecs that have contracts of their own: lossless (test_lossless.py) and boolean masks (test_registry.py)."""
LENGTHS = [0, 1, 2, 31, 127, 128, 129, 1000]


def test_every_registered_codec_is_tested_here() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} | OTHERS == set(available())


@pytest.mark.parametrize("name", sorted(available()))
def test_no_registered_codec_decodes_to_anything_else(name: str) -> None:
    """Zeros, or the first value everywhere, are as far away as the tensor is large."""
    codec, x = make_codec(name), randn(1000) > 0 if name == "mask" else randn(1000)
    y = decoded(codec, payload(codec, x), x).float()
    assert (y - x.float()).norm() < 0.9 * x.float().norm()


@pytest.fixture(params=SPECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return make_codec(request.param)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_any_length_of_any_float_comes_back(codec: Codec, numel: int, dtype: torch.dtype) -> None:
    x = randn(numel, dtype=dtype)
    buf = payload(codec, x)
    assert buf.numel() % PAYLOAD_ALIGNMENT == 0
    if isinstance(codec, FixedSizeCodec):
        assert buf.numel() == codec.payload_bytes(numel, dtype)
    y = decoded(codec, buf, x)
    assert bool(payload_finite(buf))
    assert torch.isfinite(y).all()
    # int2 may be as far as half its range away; nothing is further than that.
    assert (
        (y - x).abs().max() <= 0.6 * (x.max() - x.min()).clamp(min=x.abs().max()) if numel else y.numel() == 0
    )


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("spec", [*SPECS, "int2:block=32", "int2:block=32,hadamard"])
def test_every_byte_of_a_payload_is_written(spec: str, backend: str) -> None:
    """No byte of whatever was in the memory before goes over the wire or to a drive."""
    codec = make_codec(spec, backend)
    for numel in (1, 31, 96, 127, 129, 1000):
        x = randn(numel)
        assert torch.equal(payload(codec, x), payload(codec, x, dirty=0xFF))


def test_the_payload_has_the_stated_bits_per_value(codec: Codec) -> None:
    numel = 1 << 16
    nbytes = payload(codec, randn(numel)).numel()
    assert 8 * (nbytes - HEADER_BYTES) / numel == pytest.approx(codec.bits_per_value, abs=1e-3)


def test_the_spec_makes_the_codec_again(codec: Codec) -> None:
    assert make_codec(codec.spec) == codec
    assert make_codec(codec.spec).spec == codec.spec


def test_strides_do_not_matter(codec: Codec) -> None:
    x = randn(24, 33).t()
    assert not x.is_contiguous()
    assert torch.equal(payload(codec, x), payload(codec, x.contiguous()))
    out = torch.empty(24, 33).t()
    codec.decode(payload(codec, x), out)
    assert torch.equal(out, decoded(codec, payload(codec, x), x.contiguous()))


@pytest.mark.parametrize(
    "x",
    [
        randn(400)[::3],
        randn(70, 5)[:, 2:3],
        randn(1).expand(90),
        randn(3)[1:2].expand(1),
        randn(4, 6)[2:3, ::6],
    ],
    ids=["steps", "a column", "repeated", "one", "one of a row"],
)
def test_neither_do_strides_of_what_is_a_vector(codec: Codec, x: torch.Tensor) -> None:
    """Their `reshape(-1)` is a view with these strides."""
    assert torch.equal(payload(codec, x), payload(codec, x.clone().contiguous()))
    out = torch.full((x.numel(), 2), torch.nan)[:, :1]
    codec.decode(payload(codec, x), out)
    assert torch.equal(out.flatten(), decoded(codec, payload(codec, x), x.flatten()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8])
def test_one_value_of_any_type_and_stride(dtype: torch.dtype) -> None:
    codec = make_codec("lossless")
    x = torch.arange(1, 9).to(dtype)[1::5][:1]
    assert x.stride() == (5,)
    assert torch.equal(decoded(codec, payload(codec, x), x), x)


@pytest.mark.parametrize("spec", ["exact", "lossless"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_one_value_of_any_stride_is_decoded_into(spec: str, dtype: torch.dtype) -> None:
    x = torch.arange(7, 8).to(dtype)
    memory = torch.zeros(9, dtype=dtype)
    out = memory[2::5][:1]
    assert out.is_contiguous() and out.stride() == (5,)
    make_codec(spec).decode(payload(make_codec(spec), x), out)
    assert memory.tolist() == [0, 0, 7, *[0] * 6]


def test_values_that_are_negated_when_they_are_read(codec: Codec) -> None:
    """Their bytes in memory have the other sign."""
    x = randn(600)
    negated = torch._neg_view(x.clone())
    assert negated.is_neg() and negated.is_contiguous()
    assert torch.equal(payload(codec, negated), payload(codec, -x))
    out = torch._neg_view(torch.zeros(600))
    codec.decode(payload(codec, x), out)
    assert torch.equal(out.resolve_neg(), decoded(codec, payload(codec, x), x))


@pytest.mark.parametrize("spec", ["exact", "lossless"])
def test_values_that_are_conjugated_when_they_are_read(spec: str) -> None:
    codec, x = make_codec(spec), torch.complex(randn(300), randn(300, seed=1))
    buf = payload(codec, x.conj())
    assert torch.equal(decoded(codec, buf, x), x.conj().resolve_conj())
    out = torch.empty_like(x).conj()
    codec.decode(payload(codec, x), out)
    assert torch.equal(out, x)


def test_the_input_is_not_modified_and_may_require_grad(codec: Codec) -> None:
    x = randn(300).requires_grad_()
    before = x.detach().clone()
    codec.encode(x, torch.empty(codec.max_payload_bytes(300, x.dtype), dtype=torch.uint8), KEY)
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("contiguous", [True, False])
def test_accumulate_adds_what_decode_gives_in_float32(codec: Codec, contiguous: bool) -> None:
    x = randn(20, 31, seed=1)
    buf = payload(codec, x)
    base = randn(20, 31, seed=2)
    out = base.clone() if contiguous else base.t().contiguous().t()
    expected = base + decoded(codec, buf, x)
    assert codec.decode(buf, out, accumulate=True) is not None
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [s for s in SPECS if not make_codec(s).lossless])
def test_decode_rounds_to_the_output_dtype_once(spec: str, dtype: torch.dtype) -> None:
    codec = make_codec(spec)
    x = randn(500)
    buf = payload(codec, x)
    assert torch.equal(decoded(codec, buf, x, dtype), decoded(codec, buf, x).to(dtype))


def test_accumulate_rejects_half_precision(codec: Codec) -> None:
    x = randn(8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="float32"):
        codec.decode(payload(codec, x), torch.zeros_like(x), accumulate=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("at", [0, 200, 999])
def test_inf_and_nan_never_vanish(codec: Codec, bad: float, dtype: torch.dtype, at: int) -> None:
    x = randn(1000, dtype=dtype)
    x[at] = bad
    buf = payload(codec, x)
    assert not bool(payload_finite(buf))
    y = decoded(codec, buf, x)
    assert not torch.isfinite(y[at])
    out = torch.zeros(1000)
    if not codec.lossless:
        codec.decode(buf, out, accumulate=True)
        assert not torch.isfinite(out.sum())
    # No codec spoils more than its largest block on either side.
    far = (torch.arange(1000) - at).abs() >= 256
    assert torch.isfinite(y[far]).all()


def test_a_tensor_of_zeros_stays_zero(codec: Codec) -> None:
    x = torch.zeros(100_000)
    assert torch.count_nonzero(codec.roundtrip(x, KEY)) == 0


def test_the_same_key_gives_the_same_payload_and_no_global_generator_is_touched(codec: Codec) -> None:
    x = randn(1000)
    state = torch.get_rng_state()
    first, second = payload(codec, x), payload(codec, x)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_get_what_one_thread_gets(codec: Codec) -> None:
    xs = [randn(5000, seed=i) for i in range(4)]
    expected = [payload(codec, x, Key(1, tensor=i)) for i, x in enumerate(xs)]
    got: dict[int, list[bool]] = {}

    def work(i: int) -> None:
        got[i] = [torch.equal(payload(codec, xs[i], Key(1, tensor=i)), expected[i]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == {i: [True] * 5 for i in range(4)}


def test_decode_rejects_what_is_not_its_payload(codec: Codec) -> None:
    x = randn(256)
    buf = payload(codec, x)
    other = make_codec("int8:block=256")
    with pytest.raises(PayloadError, match="256 values"):
        codec.decode(torch.cat([buf, buf]), torch.empty(255))
    with pytest.raises(PayloadError, match=r"not a payload of"):
        codec.decode(torch.cat([payload(other, x), torch.zeros(2048, dtype=torch.uint8)]), torch.empty(256))
    if codec.lossless:
        with pytest.raises(PayloadError, match="float32"):
            codec.decode(buf, torch.empty(256, dtype=torch.bfloat16))


def test_buffers_are_checked(codec: Codec) -> None:
    x = randn(256)
    need = codec.max_payload_bytes(256, x.dtype)
    with pytest.raises(ValueError, match=f"needs {need} bytes"):
        codec.encode(x, torch.empty(need - 1, dtype=torch.uint8), KEY)
    with pytest.raises(ValueError, match="multiple of 16"):
        codec.encode(x, torch.empty(need + 1, dtype=torch.uint8)[1:], KEY)
    memory = torch.empty(need + 32, dtype=torch.uint8)
    begun_late = torch.frombuffer(
        memory.numpy(), dtype=torch.uint8, offset=3
    )  # its memory, not its address, is odd
    with pytest.raises(ValueError, match="storage, which is not a multiple of 8"):
        codec.encode(x, begun_late[-begun_late.data_ptr() % PAYLOAD_ALIGNMENT :], KEY)
    with pytest.raises(ValueError, match="uint8"):
        codec.encode(x, torch.empty(need), KEY)
    with pytest.raises(ValueError, match="contiguous"):
        codec.encode(x, torch.empty(2 * need, dtype=torch.uint8)[::2], KEY)
    with pytest.raises(ValueError, match="meta"):
        codec.encode(x, torch.empty(need, dtype=torch.uint8, device="meta"), KEY)
    if torch.int64 not in codec.inputs:
        with pytest.raises(TypeError, match="int64"):
            codec.encode(torch.arange(4), torch.empty(4096, dtype=torch.uint8), KEY)


def test_bytes_behind_the_payload_are_left_alone(codec: Codec) -> None:
    x = randn(333)
    need = codec.max_payload_bytes(333, x.dtype)
    buf = torch.full((need + 64,), 0xA5, dtype=torch.uint8)
    codec.encode(x, buf, KEY)
    assert (buf[need:] == 0xA5).all()


@pytest.mark.parametrize("spec", [s for s in SPECS if "stochastic" in s])
def test_stochastic_rounding_without_a_key_is_rejected(spec: str) -> None:
    with pytest.raises(ValueError, match="Key"):
        payload(make_codec(spec), randn(8), None)
