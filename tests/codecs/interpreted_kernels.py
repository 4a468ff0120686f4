"""The Triton kernels, run by Triton's interpreter on the CPU, against the torch reference.

Run by test_kernels.py in a process of its own, because Triton decides at import whether it interprets.
"""

import os

import pytest
import torch

from ssdtrain.codecs import make_codec, payload_finite
from tests.codecs.common import FLOATS, payload, randn

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
]


def assert_same(spec: str, x: torch.Tensor, outputs: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
    kernels, reference = make_codec(spec, "triton"), make_codec(spec, "torch")
    ours, expected = payload(kernels, x), payload(reference, x)
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
