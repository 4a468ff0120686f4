"""Gradients of FSDP2 whose parameters begin to train later, or have replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.comm.collectives import AllReduce, ReduceScatter
from ssdtrain.pytorch.fsdp import BETWEEN_REPLICAS
from tests.comm.test_messages import SMALL
from tests.support.ranks import on_ranks


def unfrozen(_: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    fully_shard(model)
    runtime = ssdtrain.attach(model, {"comm": {**SMALL, "dp": "int8"}})
    trained = []
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        model.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        runtime.step_end()
        trained.append(model[0].weight.grad is not None)
    found = runtime.comm.metrics()["dp"]
    return [trained, found.compressed, dict(found.fallbacks)]


@pytest.mark.slow
def test_gradients_of_parameters_that_train_later_are_compressed() -> None:
    assert on_ranks(2, unfrozen) == [[[False, False, True, True], 4, {}]] * 2


def replicated(_: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    runtime = ssdtrain.attach(model, {"comm": {**SMALL, "dp": "int8"}})
    model(torch.randn(8, 64)).square().sum().backward()
    return runtime.comm.metrics()["dp"]


@pytest.mark.slow
def test_what_fsdp_reduces_between_replicas_is_counted_as_uncompressed() -> None:
    whole = 2 * 64 * 64 * 4
    for found in on_ranks(4, replicated):
        between = AllReduce.ring_bytes(whole // 2, 2)
        assert (found.compressed, dict(found.fallbacks)) == (1, {BETWEEN_REPLICAS: 1})
        assert found.raw_bytes == ReduceScatter.ring_bytes(whole, 2) + between
        assert between < found.wire_bytes < found.raw_bytes
