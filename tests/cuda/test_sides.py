"""Saved tensors of several streams on a device whose work comes late."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain


class TwoStreams(torch.nn.Module):
    """Computes one branch on a stream of its own, as shared experts do, and joins it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64, device=device)
        self.second = torch.nn.Linear(64, 64, device=device)
        self.side = torch.cuda.Stream(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        y = torch.sin(x * 2)  # memory of the main stream that the side stream saves too
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            branch = torch.nn.functional.gelu(self.first(y)) * y
            y.record_stream(self.side)
        x = torch.nn.functional.gelu(self.second(y)) * y
        main.wait_stream(self.side)
        branch.record_stream(main)
        return x + branch.sin()


def gradients(device: torch.device, section: dict[str, Any] | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[TwoStreams(device) for _ in range(4)])
    runtime = ssdtrain.attach(model, {"offload": section, "report": {"interval": 0}}) if section else None
    shown = []
    try:
        for step in range(4):
            x = torch.randn(96, 64, generator=torch.Generator().manual_seed(step)).to(device)
            model.zero_grad()
            model(x).square().mean().backward()
            shown += [
                parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
            ]
    finally:
        if runtime is not None:
            runtime.close()
    return shown


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("tier", ["drive", "host"])
def test_branches_on_two_streams(tier: str, device: torch.device, tmp_path: Path) -> None:
    section: dict[str, Any] = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
    section |= {"host": "64MiB"} if tier == "host" else {}
    expected, found = gradients(device, None), gradients(device, section)
    assert len(expected) == len(found) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("tier", ["drive", "host"])
def test_a_store_waits_for_the_stream_that_saved(tier: str, device: torch.device, tmp_path: Path) -> None:
    """1. A slow branch on a stream of its own saves a tensor. 2. The main stream, not joined to it, saves the next one, and
    the store of the first begins. 3. All stores end: backward gets what was stored."""
    side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    x = torch.arange(1 << 16, device=device, dtype=torch.float32).requires_grad_()

    def gradient(forward: AbstractContextManager[Any]) -> torch.Tensor:
        torch.full((1 << 18,), float("nan"), device=device)  # what is in the memory that is given next
        with forward:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(300_000_000)
                branch = (x * 3).sin()
            other = (x * 2).cos()
            main.wait_stream(side)
            total = branch.sum() + other.sum()
        del branch, other
        while offload.runtime.statistics().offload.in_flight_bytes:  # type: ignore[union-attr]
            time.sleep(0.01)
        (found,) = torch.autograd.grad(total, x)
        return found

    directories, host = (str(tmp_path), 0) if tier == "drive" else (None, "64MiB")
    offload = ssdtrain.offload(
        directories, device=device, amount="all", min_bytes=1, buffer="64MiB", host=host
    )
    try:
        for _ in range(2):
            assert torch.equal(gradient(offload), gradient(nullcontext()))
    finally:
        offload.runtime.close()
