"""The C implementation against the torch reference: the same bytes and the same values, bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssdtrain.codecs import Codec, make_codec, payload_finite
from ssdtrain.codecs import native as native_module
from ssdtrain.codecs.exact import Exact
from tests.codecs.common import FLOATS, payload, randn
from tests.support.tiers import tiered

SPECS = [
    "fp8",
    "fp8:format=e5m2",
    "fp8:block=32,hadamard",
    "fp8:format=e5m2,hadamard=64",
    "bf16",
    *(
        f"int{bits}:block={block}{more}"
        for bits in (8, 4, 2)
        for block in (32, 64, 128, 256)
        for more in ("",)
    ),
    "int8:round=stochastic",
    "int4:block=64,round=stochastic",
    "int2:block=32,round=stochastic",
    "int8:asymmetric",
    "int4:asymmetric,block=64",
    "int2:asymmetric,block=32,round=stochastic",
    "int4:block=64,round=stochastic,asymmetric,hadamard=256",
    "int8:hadamard=16",
    "int4:hadamard",
    "int8:block=64,round=stochastic,hadamard",
    "int2:block=32,asymmetric,hadamard",
    "bf16:hadamard=32",
    "zfp:rate=2.25",
    "zfp:rate=8",
    "zfp:rate=13.75",
    "zfp:rate=16",
    "zfp:rate=32",
    "zfp:rate=8,hadamard=64",
]
THREADED = [
    "bf16",
    "int8:round=stochastic",
    "int4:hadamard",
    "int2:block=32,asymmetric",
    "zfp:rate=8",
    "zfp:rate=13.75",
]


def _bits(values: Tensor) -> Tensor:
    """Bits with every NaN alike: torch's own casts give different NaN in vector loops and behind them."""
    values = torch.where(torch.isnan(values), torch.full_like(values, torch.nan), values)
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def assert_same(spec: str, x: Tensor) -> None:
    ours, reference = make_codec(spec, "native"), make_codec(spec, "torch")
    a, b = payload(ours, x), payload(reference, x)
    assert bool(payload_finite(a)) == bool(payload_finite(b)) == bool(_encodable(spec, x).isfinite().all())
    if spec.startswith("bf16"):
        assert torch.equal(_bits(_body(ours, a, x)), _bits(_body(reference, b, x)))
    else:
        assert torch.equal(a, b)
    for dtype in FLOATS:
        into = torch.empty(x.shape, dtype=dtype), torch.empty(x.shape, dtype=dtype)
        assert torch.equal(_bits(ours.decode(b, into[0])), _bits(reference.decode(b, into[1])))
    base = randn(*x.shape, seed=9)
    c, d = base.clone(), base.clone()
    ours.decode(b, c, accumulate=True)
    reference.decode(b, d, accumulate=True)
    assert torch.equal(_bits(c), _bits(d))


def _encodable(spec: str, x: Tensor) -> Tensor:
    """What decides whether the payload is finite."""
    if "hadamard" in spec:
        x = torch.where(x.float().abs() < 1e36, x.float(), torch.nan)
    return x.bfloat16() if spec.startswith("bf16") else x


def _body(codec: Codec, buf: Tensor, x: Tensor) -> Tensor:
    return codec.decode(buf, torch.empty(x.shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", tiered(FLOATS, quick=[torch.bfloat16]), ids=str)
def test_the_same_bytes_for_every_length_and_scale(spec: str, dtype: torch.dtype) -> None:
    for numel in (1, 2, 3, 31, 64, 65, 127, 1000, 4099):
        for scale in (1.0, 1e-4, 3e-7):
            assert_same(spec, (randn(numel, seed=numel) * scale).to(dtype))
    if dtype == torch.bfloat16:
        assert_same(spec, (randn(300) * 1e-38).to(dtype))
        assert_same(spec, (randn(300) * 1e35).to(dtype))


special = st.sampled_from([0.0, -0.0, 1e-45, -1e-42, 2.0**-126, 6e-8, 65504.0, -65504.0, 3.3e38, -3.4e38])
bad = st.sampled_from([float("inf"), -float("inf"), float("nan")])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    runs=st.lists(
        st.tuples(
            st.one_of(st.floats(width=32), special, bad, st.floats(-2, 2, width=32)), st.integers(1, 90)
        ),
        min_size=1,
        max_size=8,
    ),
    noise=st.sampled_from([0.0, 1e-41, 1e-3, 1.0]),
    spec=st.sampled_from([s for s in SPECS if "hadamard" not in s]),
    dtype=st.sampled_from(FLOATS),
)
def test_the_same_bytes_for_any_values(
    runs: list[tuple[float, int]], noise: float, spec: str, dtype: torch.dtype
) -> None:
    x = torch.cat([torch.full((n,), v) for v, n in runs])
    assert_same(spec, (x + noise * randn(x.numel())).to(dtype))


@settings(max_examples=50, deadline=None)
@given(data=st.binary(min_size=1, max_size=300))
def test_masks_are_the_same_bytes(data: bytes) -> None:
    x = torch.frombuffer(bytearray(data), dtype=torch.uint8) > 127
    a, b = payload(make_codec("mask", "native"), x), payload(make_codec("mask", "torch"), x)
    assert torch.equal(a, b)
    assert torch.equal(make_codec("mask", "native").decode(b, torch.empty_like(x)), x)


@pytest.mark.parametrize("numel", [5, 8, 771])
@pytest.mark.parametrize("spec", ["mask", "mask:sparse"])
def test_bools_with_other_bytes_than_0_and_1_are_true(spec: str, numel: int) -> None:
    """As torch takes them, such as a view of uint8."""
    x = torch.arange(numel).to(torch.uint8).view(torch.bool)
    assert torch.equal(make_codec(spec, "native").roundtrip(x), x)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=300), dtype=st.sampled_from([*FLOATS, torch.int16, torch.int32]))
def test_lossless_payloads_are_the_same_bytes(data: bytes, dtype: torch.dtype) -> None:
    data = data[: len(data) // 4 * 4] * 20
    x = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    a, b = payload(make_codec("lossless", "native"), x), payload(make_codec("lossless", "torch"), x)
    assert torch.equal(a, b)
    assert torch.equal(
        make_codec("lossless", "native").decode(b, torch.empty_like(x)).view(torch.uint8), x.view(torch.uint8)
    )


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts torch's number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("spec", THREADED)
def test_the_bytes_do_not_depend_on_the_number_of_threads(spec: str, threads: None) -> None:
    numel = (1 << 20) + 77  # enough for four threads, and a last block that is cut off
    codec, x, base = make_codec(spec, "native"), randn(numel), randn(numel, seed=1)
    spoilt = x.clone()
    spoilt[numel // 2] = torch.nan
    found = []
    for count in (1, 3, 4):
        torch.set_num_threads(count)
        buf, sum_ = payload(codec, x), base.clone()
        codec.decode(buf, sum_, accumulate=True)
        bad = payload(codec, spoilt)
        assert bool(payload_finite(buf))
        assert not bool(payload_finite(bad))
        found.append((buf, bad, sum_, codec.decode(buf, torch.empty(numel, dtype=torch.bfloat16))))
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_neither_do_those_of_exact_nor_its_flags(dtype: torch.dtype, threads: None) -> None:
    codec = Exact("native")
    x = (randn((1 << 20) + 5000) * 0.02).to(dtype)
    bad, wide = x.clone(), x.clone()
    bad[1 << 19] = torch.nan
    wide[1 << 19 :].mul_(2.0 ** -(torch.arange(x.numel() - (1 << 19)) % 40))
    found = []
    for count in (1, 4):
        torch.set_num_threads(count)
        found.append([payload(codec, values) for values in (x, bad, wide)])
        assert [bool(payload_finite(buf)) for buf in found[-1]] == [True, False, True]
        assert [bool(codec.overflow_flag(buf)) for buf in found[-1]] == [False, False, True]
        assert torch.equal(codec.decode(found[-1][0], torch.empty_like(x)), x)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_every_float16_converts_as_in_torch() -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    buf = payload(make_codec("bf16", "native"), x)
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    assert torch.equal(_bits(make_codec("bf16", "native").decode(buf, out)), _bits(x.bfloat16()))
    wide = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    buf = payload(make_codec("bf16", "native"), wide)
    half = make_codec("bf16", "native").decode(buf, torch.empty(wide.shape, dtype=torch.float16))
    assert torch.equal(_bits(half), _bits(wide.to(torch.float16)))


def test_without_the_extension_torch_takes_over_and_insisting_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = randn(100)
    with_c = payload(make_codec("int8"), x)
    monkeypatch.setattr(native_module, "module", lambda: None)
    assert torch.equal(payload(make_codec("int8"), x), with_c)
    with pytest.raises(RuntimeError, match="not built"):
        payload(make_codec("int8", "native"), x)
