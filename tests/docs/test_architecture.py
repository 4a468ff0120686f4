"""ARCHITECTURE.md shows the engine in seventy lines: that model and the engine agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ssdtrain
from tests.docs.blocks import block
from tests.docs.messages import ROOT

PAGE = "ARCHITECTURE.md"
MIN_BYTES = 256
SIZE = 64


class Layer(nn.Module):
    """A transformer layer, with views that share storages and residuals that are saved twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x).sum()
    loss.backward()
    values = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return values


def test_the_model_of_the_engine_agrees_with_the_engine(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers, x = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(4, 32, SIZE)
    plain = gradients(layers, x)

    names: dict[str, Any] = {}
    exec(block(PAGE, "import tempfile").text, names)
    model = names["EngineModel"](tmp_path, MIN_BYTES)
    with saved_tensors_hooks(model.pack, model.unpack):
        loss = layers(x).sum()
    loss.backward()
    assert all(map(torch.equal, plain, [p.grad for p in layers.parameters()]))
    layers.zero_grad()

    config = {"directories": str(tmp_path), "amount": "all", "min_bytes": MIN_BYTES}
    with ssdtrain.attach(layers, {"offload": config}) as runtime:
        assert all(map(torch.equal, plain, gradients(layers, x)))
        engine = runtime.statistics().offload
    assert (
        engine is not None and engine.offloaded_bytes + engine.avoided_write_bytes == engine.saved_bytes > 0
    )
    assert engine.shared_tensors == model.shared_tensors > 0
    assert engine.saved_tensors - engine.shared_tensors == len(model.tape)


def test_the_model_of_the_engine_notices_a_change_in_place(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block(PAGE, "import tempfile").text, names)
    model = names["EngineModel"](tmp_path, MIN_BYTES)
    x = torch.randn(64, 64, requires_grad=True)
    with saved_tensors_hooks(model.pack, model.unpack):
        y = x.exp()
        loss = y.sum()
    y.data.add_(0)  # an alias with a counter of its own: nothing to notice
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_files_that_the_page_names_are_there() -> None:
    named = re.findall(r"`(ssdtrain[\w/]*(?:\.py)?)`", (ROOT / PAGE).read_text())
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
