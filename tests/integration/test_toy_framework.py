"""The trainer of the page "Add a framework" trains as without SSDTrain, and moves something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.docs.blocks import block


def trained(config: dict[str, Any] | None) -> tuple[list[torch.Tensor], Any]:
    names: dict[str, Any] = {}
    exec(compile(block("docs/framework.md", "import torch").text, "framework.md", "exec"), names)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    trainer = names["ToyTrainer"](model, torch.optim.SGD(model.parameters(), 0.1), config)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        trainer.step([torch.randn(32, 64, generator=generator) for _ in range(3)])
    statistics = trainer.runtime.statistics()
    trainer.close()
    return [parameter.detach() for parameter in model.parameters()], statistics


def test_the_toy_trainer_gets_the_same_weights(tmp_path: Path) -> None:
    offload = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
    weights, statistics = trained({"offload": offload})
    expected, nothing = trained({})
    assert all(map(torch.equal, weights, expected)) and nothing is None
    assert statistics.offload.offloaded_bytes + statistics.offload.avoided_write_bytes > 0
    assert statistics.steps == 3
