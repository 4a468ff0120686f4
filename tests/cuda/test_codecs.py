"""Codecs of activations on the device: the gradients of a run on the CPU with the same codec, whatever comes late.

What computes on the emulated device are the CPU's kernels, so that the same payloads give the same bits. Triton's kernels run
in its interpreter, where `TRITON_INTERPRET=1` is set: `make test-cuda` runs this file so, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import emulated_cuda
import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.codecs.registry import make_codec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAST = ["bf16", "fp16", "raw"]
TRITON = [
    "int8",
    "int4:round=stochastic",
    "int2:asymmetric",
    "fp8",
    "int4:hadamard",
    "exact",
]  # zfp takes minutes: see test_kernels.py
WIDTH = 32


class Block(nn.Module):
    """A block that saves floats of several sizes and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(y.masked_fill(y < -0.1, 0.0))


def gradients(device: str, codec: str, directory: Path, tier: str = "drive") -> list[torch.Tensor]:
    """Losses and gradients of two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).to(device)
    section = {"directories": str(directory), "amount": "all", "min_bytes": 1, "codec": codec}
    section |= {"host": "16MiB"} if tier == "host" else {}
    found = []
    with ssdtrain.attach(model, {"offload": section, "report": {"interval": 0}}) as runtime:
        for step in range(2):
            x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            found += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
            runtime.step_end()
        statistics = runtime.statistics()
        assert statistics.offload.encoded_bytes > 0
    return found


@pytest.mark.parametrize("tier", ["drive", "host"])
@pytest.mark.parametrize("codec", ["off", *(TRITON if INTERPRETED else CAST)])
def test_what_comes_back_is_what_the_cpu_decodes(codec: str, tier: str, tmp_path: Path) -> None:
    expected = gradients("cpu", codec, tmp_path)
    with emulated_cuda.settings(delay_ms=0 if INTERPRETED else 5, h2d_gbps=1, d2h_gbps=1):
        found = gradients("cuda", codec, tmp_path, tier)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies to the host what its kernels compute with")
@pytest.mark.parametrize("spec", ["mask", "int8", "bf16", "exact"])
def test_a_size_never_seen_before_makes_the_host_wait_for_nothing(spec: str, device: torch.device) -> None:
    codec = make_codec(spec)

    def encode(numel: int) -> None:
        values = torch.ones(numel, dtype=codec.inputs[0], device=device)
        codec.encode(
            values,
            torch.empty(codec.max_payload_bytes(numel, values.dtype), dtype=torch.uint8, device=device),
        )

    encode(64)  # compiles, or makes what stays
    before = emulated_cuda.counts()
    for numel in (65, 200, 3000):
        encode(numel)
    after = emulated_cuda.counts()
    assert emulated_cuda.host_waits(before, after) == {}
    assert after.get("pageable copies", 0) == before.get("pageable copies", 0)
