"""Under ZeRO-3 nothing that belongs to a parameter leaves, however it is disguised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ssdtrain_ds
from tests.deepspeed.conftest import MakeEngine


class Disguised(nn.Module):
    """Uses its weight in a way that saves something other than the parameter. Saves no activation of 4096 bytes."""

    def __init__(self, disguise: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.factor = nn.Parameter(torch.ones(4, 64))
        self.disguise = disguise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x * self.factor, self.disguise(self.weight))


DISGUISES = {
    "itself": lambda weight: weight,
    "transposed": lambda weight: weight.t(),
    "view": lambda weight: weight.view(32, 128).view(64, 64),
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data.t(),
}


class Model(nn.Module):
    def __init__(self, disguise: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Disguised(disguise) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("disguise", DISGUISES.values(), ids=DISGUISES)
@pytest.mark.parametrize("efficient", [True, False], ids=["memory-efficient-linear", "linear"])
def test_no_gathered_parameter_is_spilled(disguise: Any, efficient: bool, make_engine: MakeEngine) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": efficient}
    engine = make_engine(model=Model(disguise), zero_optimization=zero)
    for _ in range(2):
        loss = engine(torch.randn(4, 64))
        engine.backward(loss)
        engine.step()
    runtime = ssdtrain_ds.runtime_of(engine)
    found = runtime.statistics()
    assert found.offload.saved_bytes == 0
    assert found.offload.saved_tensors > 0


def test_the_hooks_that_watch_gathering_go_with_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(model=Model(DISGUISES["itself"]), zero_optimization={"stage": 3})
    plain = make_engine(None, model=Model(DISGUISES["itself"]), zero_optimization={"stage": 3})
    layer = engine.module.layers[0]
    count = len(layer._forward_pre_hooks)
    assert count == len(plain.module.layers[0]._forward_pre_hooks) + 1
    engine.destroy()
    names = [getattr(hook, "__qualname__", "") for hook in layer._forward_pre_hooks.values()]
    assert not [name for name in names if "GatheredStorages" in name]
