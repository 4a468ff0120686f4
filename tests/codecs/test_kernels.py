"""The Triton kernels without a GPU: interpreted on the CPU against the torch reference, and compiled for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssdtrain.codecs import make_codec
from tests.codecs.common import FLOATS, KEY, payload, randn

ROOT = Path(__file__).parents[2]


def _run(arguments: list[str], **environment: str) -> None:
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_interpreted_kernels_give_the_bytes_of_the_reference() -> None:
    _run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/codecs/interpreted_kernels.py"],
        TRITON_INTERPRET="1",
    )


@pytest.mark.slow
def test_kernels_compile_without_fused_or_approximate_arithmetic(tmp_path: Path) -> None:
    _run(["-m", "tests.codecs.compiled_kernels"], TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "spec",
    ["int8", "int4:block=64,round=stochastic", "int2:block=32,asymmetric,round=stochastic", "zfp:rate=8"],
)
def test_on_a_device_the_bytes_are_those_of_the_reference(spec: str, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for numel in (1, 129, 100_003):
        x = randn(numel).to(dtype)
        expected = payload(make_codec(spec, "torch"), x)
        codec = make_codec(spec)
        buf = torch.empty(codec.max_payload_bytes(numel, dtype), dtype=torch.uint8, device="cuda")
        codec.encode(x.cuda(), buf, KEY)
        assert torch.equal(buf.cpu(), expected)
        out = codec.decode(buf, torch.empty(numel, dtype=dtype, device="cuda"))
        assert torch.equal(
            out.cpu(), make_codec(spec, "torch").decode(expected, torch.empty(numel, dtype=dtype))
        )
