"""The Triton kernels without a GPU: interpreted on the CPU against the torch reference, and compiled for a GPU."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdtrain.codecs import kernels, make_codec, warm_up
from tests.codecs.common import DIRTY, FLOATS, KEY, payload, randn
from tests.support.processes import ran

ROOT = Path(__file__).parents[2]


def _run(arguments: list[str], **environment: str) -> None:
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    ran(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=280,
    )


@pytest.mark.slow
def test_interpreted_kernels_give_the_bytes_of_the_reference() -> None:
    _run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/codecs/interpreted_kernels.py"],
        TRITON_INTERPRET="1",
    )


@pytest.mark.slow
def test_kernels_compile_without_fused_or_approximate_arithmetic(tmp_path: Path) -> None:
    _run(["-m", "tests.codecs.compiled_kernels"], TRITON_CACHE_DIR=str(tmp_path))


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the current device, which need not be theirs."""
    current: list[Any] = []
    launched: list[Any] = []

    class DeviceOf:
        def __init__(self, tensor: Any) -> None:
            self._tensor = tensor

        def __enter__(self) -> None:
            current.append(self._tensor)

        def __exit__(self, *error: object) -> None:
            current.pop()

    def launch(*arguments: Any) -> None:
        launched.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    stub = SimpleNamespace(
        encode=launch, decode=launch, rotate=launch, unrotate=launch, pack=launch, unpack=launch
    )
    for name in ("block", "exact", "hadamard", "mask", "zfp"):
        monkeypatch.setitem(sys.modules, f"{kernels.__name__}.{name}", stub)
    flat, body, out = (torch.zeros(1) for _ in range(3))
    anything: Any = None
    kernels.block_encode(anything, flat, body, anything, None, torch.float32)
    kernels.block_decode(anything, body, out, False)
    kernels.mask_pack(flat, body)
    kernels.mask_unpack(body, out)
    kernels.exact_encode(flat, body, anything)
    kernels.exact_decode(body, out)
    kernels.rotate(flat, body, out, 1.0)
    kernels.unrotate(body, out, flat, 1.0, False)
    kernels.zfp_encode(flat, body, 8)
    kernels.zfp_decode(body, out, 8, False)
    assert [id(tensor) for tensor in launched] == [
        id(t) for t in (flat, out, flat, out, flat, out, flat, out, flat, out)
    ]


def test_a_codec_is_compiled_before_training_for_whole_programs_and_for_a_partial_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[torch.dtype, bool]] = []

    def run_once(codec: Any, device: torch.device, dtype: torch.dtype, numel: int) -> None:
        ran.append((dtype, numel % 16 == 0))

    monkeypatch.setattr(warm_up, "run_once", run_once)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    warm_up.warm_up(make_codec("int8"), torch.device("cuda", 0), (torch.float32, torch.int64))
    assert ran == [(torch.float32, True), (torch.float32, False)]
    warm_up.warm_up(make_codec("int8"), torch.device("cpu"), (torch.float32,))
    assert len(ran) == 2, "nothing is compiled for a CPU"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        "int8",
        "int4:block=64,round=stochastic",
        "int2:block=32,asymmetric,round=stochastic",
        "fp8:block=64",
        "int4:block=128,hadamard",
        "zfp:rate=8",
        "exact",
    ],
)
def test_on_a_device_the_bytes_are_those_of_the_reference(spec: str, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On the emulated device Triton interprets, which takes a thousand times as long.
    for numel in (1, 129, 1_003 if os.environ.get("TRITON_INTERPRET") == "1" else 100_003):
        x = randn(numel).to(dtype)
        expected = payload(make_codec(spec, "torch"), x)
        codec = make_codec(spec)
        buf = torch.full_like(expected, ~DIRTY & 0xFF, device="cuda")
        codec.encode(x.cuda(), buf, KEY)
        assert torch.equal(buf.cpu(), expected)
        out = codec.decode(buf, torch.empty(numel, dtype=dtype, device="cuda"))
        assert torch.equal(
            out.cpu(), make_codec(spec, "torch").decode(expected, torch.empty(numel, dtype=dtype))
        )


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 7, 8, 129, 10_007])
def test_on_a_device_masks_are_packed_as_by_the_reference(numel: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = randn(numel) > 0.3
    expected, codec = payload(make_codec("mask", "torch"), x), make_codec("mask")
    buf = torch.full_like(expected, ~DIRTY & 0xFF, device="cuda")
    codec.encode(x.cuda(), buf)
    assert torch.equal(buf.cpu(), expected)
    assert torch.equal(codec.decode(buf, torch.empty(numel, dtype=torch.bool, device="cuda")).cpu(), x)
