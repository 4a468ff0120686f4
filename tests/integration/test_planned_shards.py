"""FSDP2 with a plan's place of model state trains as without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain.planner.planned_state import PlannedState
from ssdtrain.pytorch.planned_state import fully_shard_options

STATE = PlannedState(
    place="host",
    zero=3,
    ranks=1,
    blocks=3,
    persistent=1,
    buffers=2,
    block_parameters=72,
    outer_parameters=0,
    largest_parameter=64,
    cpu_optimizer=True,
)


@pytest.fixture
def single_rank() -> Iterator[None]:
    ours = not dist.is_initialized()  # tests of frameworks in this process have a group of one already
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if ours:
        dist.destroy_process_group()


def written(state: PlannedState, directory: Path) -> str:
    file = directory / "plan.json"
    file.write_text(json.dumps({"state": state.to_dict()}))
    return str(file)


def test_blocks_that_stay_are_not_resharded_and_others_are_offloaded(tmp_path: Path) -> None:
    first, *others = fully_shard_options(written(STATE, tmp_path))
    assert first == {"reshard_after_forward": False}
    for options in others:
        assert options["reshard_after_forward"]
        assert isinstance(options["offload_policy"], CPUOffloadPolicy)
    shares = fully_shard_options(written(replace(STATE, ranks=2), tmp_path))
    assert [options["reshard_after_forward"] for options in shares] == [True, True, True]
    assert [len(options) for options in shares] == [1, 2, 2]


def test_a_sharded_model_trains_equal_to_one_without_a_plan(tmp_path: Path, single_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def losses(options: list[dict[str, Any]]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
        for block, given in zip(model, options, strict=True):
            fully_shard(block, mesh=mesh, **given)
        fully_shard(model, mesh=mesh)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(3):
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    plain = losses([{}, {}, {}])
    assert plain[0] != plain[2]
    assert all(map(torch.equal, losses(fully_shard_options(written(STATE, tmp_path))), plain))


def test_a_plain_loop_is_told_what_to_write_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssdtrain\.plan\.file: .* the section state, or for FSDP2"):
        ssdtrain.attach(nn.Linear(2, 2), {"plan": {"file": written(STATE, tmp_path)}})
