"""Saved tensors of several streams on a device whose work comes late."""

from __future__ import annotations

from contextlib import nullcontext
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
    config, shown = {"offload": section, "report": {"interval": 0}}, []
    with ssdtrain.attach(model, config) if section else nullcontext():
        for step in range(4):
            x = torch.randn(96, 64, generator=torch.Generator().manual_seed(step)).to(device)
            model.zero_grad()
            model(x).square().mean().backward()
            shown += [
                parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
            ]
    return shown


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("tier", ["drive", "host"])
def test_branches_on_two_streams(tier: str, device: torch.device, tmp_path: Path) -> None:
    section: dict[str, Any] = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
    section |= {"host": "64MiB"} if tier == "host" else {}
    expected, found = gradients(device, None), gradients(device, section)
    assert len(expected) == len(found) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
