"""Tensors that the program has too, though they have left."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ssdtrain.config import load_config
from ssdtrain.planner.spans import BlockSpans
from ssdtrain.runtime import Runtime

REGION = 64 * 64 * 4


class Stack(nn.Module):
    """Three blocks of eight regions; the second and third get the model's input too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sines() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = x * 2
        for layer in self.layers:
            y = layer(y) + first
        return y.sum()


class Sines(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            y = y.sin()
        return y


def test_what_is_there_at_the_end_of_a_block_though_it_has_left_is_noticed(tmp_path: Path) -> None:
    model = Stack()
    offload = {"directories": str(tmp_path), "min_bytes": "4KiB"}
    with Runtime(load_config({"offload": offload, "report": {"interval": 0}})) as runtime:
        runtime.register(model)
        runtime.engine.mover.stores.bound = 2 * REGION
        blocks = {str(number): block for number, block in enumerate(model.layers)}
        spans = BlockSpans(blocks, runtime.engine)
        with runtime.forward() as tape, spans.forward(tape) as found:
            loss = model(torch.randn(64, 64, requires_grad=True))
        loss.backward()
        spans.remove()
    first, second, third = found
    assert first.held == {first.begin: 2}  # the model has it until its end
    assert second.held == {second.begin: 0} and third.held == {
        third.begin: 0
    }  # the block's caller has its input
