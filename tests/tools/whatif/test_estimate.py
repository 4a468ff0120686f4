"""Estimates of a model by what its blocks save."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.support.model import GPT, GPTConfig
from ssdtrain.config.units import MiB
from ssdtrain.tools.model_profile import CountedStep
from ssdtrain.tools.whatif.estimate import Hardware, estimate
from ssdtrain.tools.whatif.hardware import Gpu, Ssds

LAYERS = 2


def build(batch: int) -> tuple[nn.Module, CountedStep]:
    model = GPT(GPTConfig(layers=LAYERS, hidden=64, heads=2, sequence=64))
    tokens = torch.randint(256, (batch, 64))
    return model, lambda: model(tokens, tokens)


@pytest.mark.slow
def test_blocks_of_a_shallow_model_may_leave_in_part() -> None:
    gpu = Gpu("small", 10**12, 24 * MiB, 10**11, 25 * 10**9, 25 * 10**9, "")
    ssds = Ssds(1, 10**10, 10**10)
    found = estimate(build, 48, Hardware(gpu, ssds, 1, 0, 16, 0.5))
    for block in found.blocks[:LAYERS]:
        assert len(block.parts) > 2
        assert sum(part.saved for part in block.parts) == block.saved
        assert abs(sum(part.forward for part in block.parts) - block.forward) < 1e-9
    assert found.plan is not None
    assert found.saved > found.budget >= found.plan.peak
    assert any(":" in action for action in found.plan.actions)
