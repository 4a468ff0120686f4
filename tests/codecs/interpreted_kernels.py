"""The Triton kernels, run by Triton's interpreter on the CPU, against the torch reference.

Run by test_kernels.py in a process of its own, because Triton decides at import whether it interprets.
"""

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from ssdtrain.codecs import FixedSizeCodec, make_codec, payload_finite
from ssdtrain.codecs.base import Pieces
from ssdtrain.codecs.exact import POOL_BYTES, Exact
from ssdtrain.codecs.kernels import words as checksum
from ssdtrain.codecs.kernels.block import TENSOR_STRIDE
from ssdtrain.codecs.warm_up import NUMELS, run_once
from ssdtrain.state import checksum as state
from tests.codecs.common import FLOATS, KEY, payload, randn
from tests.codecs.test_exact import SUPERBLOCK, with_exceptions, with_exponents
from tests.codecs.test_lossless import same_bits

assert os.environ.get("TRITON_INTERPRET") == "1"

INTEGERS = [
    "int8",
    "int8:block=32,round=stochastic",
    "int8:block=256,asymmetric",
    "int4:block=64",
    "int4:block=128,round=stochastic,hadamard",
    "int4:block=64,asymmetric",
    "int2:block=32",
    "int2:block=32,asymmetric,round=stochastic",
    "fp8:block=64",
    "fp8:format=e5m2,hadamard",
    "bf16:hadamard=16",
]


def assert_same(spec: str, x: torch.Tensor, outputs: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
    kernels, reference = make_codec(spec, "triton"), make_codec(spec, "torch")
    ours, expected = payload(kernels, x, dirty=0x5A), payload(reference, x)
    assert torch.equal(ours, expected)
    assert bool(payload_finite(ours)) == bool(torch.isfinite(x).all())
    for dtype in outputs:
        a, b = (codec.decode(expected, torch.empty(x.shape, dtype=dtype)) for codec in (kernels, reference))
        assert same_values(a, b)
    base = randn(x.numel(), seed=5)
    assert same_values(
        *(codec.decode(expected, base.clone(), accumulate=True) for codec in (kernels, reference))
    )


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


@pytest.mark.parametrize("spec", INTEGERS)
def test_block_integers(spec: str) -> None:
    for dtype in FLOATS if spec == INTEGERS[0] else FLOATS[:1]:
        for numel in (1, 3, 1027):
            x = randn(numel).to(dtype)
            x[numel // 2 : numel // 2 + 300] = 0
            assert_same(spec, x, FLOATS)
        x[-1] = float("inf")
        x[3] = float("nan")
        assert_same(spec, x, FLOATS)


@pytest.mark.parametrize(
    ("rate", "dtype"),
    [(2.25, FLOATS[0]), (8, FLOATS[0]), (8, FLOATS[1]), (13.75, FLOATS[2]), (32, FLOATS[0])],
)
def test_zfp(rate: float, dtype: torch.dtype) -> None:
    x = randn(1027).to(dtype)  # two programs, the second with a partial block
    x[300:700] = 0
    assert_same(f"zfp:rate={rate}", x, (dtype,))
    x = x[:6].clone()
    x[2] = float("nan")
    assert_same(f"zfp:rate={rate}", x)


@pytest.mark.parametrize("spec", [s for s in INTEGERS if "hadamard" not in s] + ["zfp:rate=16"])
def test_the_ends_of_the_range(spec: str) -> None:
    tiny = [1e-45, -1e-42, 2.0**-126, 3e-39, 0.0, -0.0, 2.0**-127, 1e-40]
    assert_same(spec, torch.tensor(tiny).repeat(20))
    assert_same(spec, torch.tensor([3.4e38, -3.4e38, 1e38, 0.0, -1e30]).repeat(30))
    assert_same(spec, torch.tensor([65504.0, -65504.0, 6e-8, 0.0], dtype=torch.float16).repeat(30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("numel", [1, 511, 512, 1500, SUPERBLOCK + 700])
def test_exact(numel: int, dtype: torch.dtype) -> None:
    assert_exact((randn(numel) * 0.02).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_exact_of_everything(dtype: torch.dtype) -> None:
    """Pools that are full and too full, outliers, Inf, denormals and bits at random."""
    full, more = 2 * POOL_BYTES, 2 * POOL_BYTES + 1
    assert_exact(torch.cat([with_exceptions(full, dtype), with_exceptions(5, dtype, seed=1)]))
    assert_exact(torch.cat([with_exceptions(5, dtype), with_exceptions(more, dtype, seed=1)]))
    assert_exact(torch.cat([with_exceptions(2, dtype, far=234), with_exceptions(900, dtype, 1, far=900)]))
    most = torch.tensor([120] + 127 * [100])
    assert_exact(with_exponents(most.repeat(4), dtype))  # all but four of the only 512 values
    assert_exact(with_exponents(torch.cat([most.repeat(5), torch.full((384,), 110)]), dtype))
    assert_exact(torch.nn.functional.gelu(3 * randn(SUPERBLOCK)).to(dtype))
    outliers = (randn(SUPERBLOCK) * 0.3).to(dtype)
    outliers[torch.arange(SUPERBLOCK) % 400 == 3] = (
        torch.tensor([3e4, torch.inf, -torch.nan]).to(dtype).repeat(14)[:41]
    )
    assert_exact(outliers)
    assert_exact(with_exponents((17 - torch.arange(SUPERBLOCK) % 31).clamp(min=0), dtype))
    raw = torch.randint(0, 256, (SUPERBLOCK * dtype.itemsize,), generator=torch.Generator().manual_seed(0))
    assert_exact(raw.to(torch.uint8).view(dtype))


def assert_exact(x: torch.Tensor) -> None:
    kernels, reference = Exact("triton"), Exact("torch")
    ours, expected = payload(kernels, x, dirty=0x5A), payload(reference, x)
    assert torch.equal(ours, expected)
    if not reference.overflow_flag(expected):
        assert same_bits(kernels.decode(expected, torch.empty_like(x)), x)
        misaligned = torch.cat([x[:1], x])[1:]
        assert misaligned.data_ptr() % 16
        assert torch.equal(payload(kernels, misaligned), expected)
        assert same_bits(kernels.decode(expected, misaligned.zero_()), x)


@pytest.mark.parametrize("skip", [0, 3])
def test_pieces_of_exact_for_all_peers_are_those_of_one_launch_each(skip: int) -> None:
    numel, ranks, codec = 1544, 4, Exact("triton")
    x = randn(ranks * numel).bfloat16()
    x[2 * numel + 5] = float("inf")
    size = codec.payload_bytes(numel, x.dtype)
    out = torch.full(((ranks - 1) * size,), 0xA5, dtype=torch.uint8)
    shards = x.split(numel)
    assert codec.encode_pieces(shards[0], out, Pieces(ranks - 1, numel, size, skip))
    for peer, found in zip([p for p in range(ranks) if p != skip], out.split(size), strict=True):
        assert torch.equal(found, payload(Exact("torch"), shards[peer]))
    assert not codec.encode_pieces(shards[0], out, Pieces(ranks - 1, numel + 1, size, skip)), "one by one"


@pytest.mark.parametrize("spec", ["int8", "int4:block=32,round=stochastic", "fp8"])
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_pieces_for_all_peers_are_those_of_one_launch_each(spec: str, skip: int) -> None:
    codec = make_codec(spec, "triton")
    assert isinstance(codec, FixedSizeCodec)
    numel, ranks = 130, 4
    x = randn(ranks * numel)
    x[(3 if skip < 3 else 2) * numel + 5] = float("inf")
    size = codec.payload_bytes(numel, x.dtype)
    out = torch.full(((ranks - 1) * size,), 0xA5, dtype=torch.uint8)
    shards, payloads = x.split(numel), out.split(size)
    assert codec.encode_pieces(shards[0], out, Pieces(ranks - 1, numel, size, skip), KEY)
    for peer, found in zip([p for p in range(ranks) if p != skip], payloads, strict=True):
        key = KEY._replace(tensor=(KEY.tensor + peer * TENSOR_STRIDE) & 0xFFFFFFFF)
        assert torch.equal(found, payload(make_codec(spec, "torch"), shards[peer], key))
        assert bool(payload_finite(found)) == (peer != (3 if skip < 3 else 2))


def test_an_encode_is_one_launch_after_its_first_words_are_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device each operator of torch is a launch, and ten of them took longer than the coding of a small piece."""
    interpreted = GridExecutor.__call__

    def uncounted(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # the interpreter calls operators to run a kernel
            interpreted(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", uncounted)
    x = randn(1024)
    counts = {}
    for spec in ("int8", "fp8", "int4:hadamard", "exact"):
        codec = make_codec(spec, "triton")
        buf = torch.empty(codec.max_payload_bytes(1024, x.dtype), dtype=torch.uint8)
        codec.encode(x, buf, KEY)  # what is cached for each device is there
        with Operators() as operators:
            codec.encode(x, buf, KEY)
        counts[spec] = operators.launches
    assert counts == {"int8": ["zero_"], "fp8": ["zero_"], "int4:hadamard": ["zero_"], "exact": ["zero_"]}


def test_warming_up_compiles_what_training_calls() -> None:
    for spec in ("int8", "fp8", "exact"):
        run_once(make_codec(spec, "triton"), torch.device("cpu"), torch.bfloat16, NUMELS[1])


class Operators(TorchDispatchMode):
    """Names of torch's operators that launch something on a device; allocations and views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("empty", "view", "slice", "as_strided", "detach", "alias", "_unsafe_view", "reshape"):
            self.launches.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 8192, 8193, 20_001])
def test_masks(numel: int) -> None:
    x = randn(numel) > 0.3
    kernels, reference = make_codec("mask", "triton"), make_codec("mask", "torch")
    ours, expected = payload(kernels, x, dirty=0x5A), payload(reference, x)
    assert torch.equal(ours, expected)
    for codec in (kernels, reference):
        assert torch.equal(codec.decode(expected, torch.empty(numel, dtype=torch.bool)), x)


@pytest.mark.parametrize("count", [1, 7, 4096, 4097, 300_001])
def test_checksums(count: int) -> None:
    words = torch.randint(-(2**62), 2**62, (count,)) * 2 + 1
    assert torch.equal(checksum.checksum(words, state._PLACE, state._MIX), state._sum_of(words, 1))
