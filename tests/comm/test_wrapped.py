"""Wrappers of plain PyTorch models that reduce gradients in a way of their own, or stand around one that does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ssdtrain
from tests.comm.test_collectives import values
from tests.comm.test_messages import Small
from tests.support.logs import heard_warnings
from tests.support.ranks import on_ranks


def compiled_behind_ddp(rank: int, own_hook: bool) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model: Any = DistributedDataParallel(Small())
    if own_hook:
        model.register_comm_hook(None, fp16_compress_hook)
    model = torch.compile(model, backend="eager")
    config = {"comm": {"dp": "int8", "min_bytes": 0, "probe": False}}
    if own_hook:
        with pytest.raises(RuntimeError, match="has another hook already: register none"):
            ssdtrain.attach(model, config)
        return True
    runtime = ssdtrain.attach(model, config)
    model(values(rank, 64 * 4).view(4, 64)).sum().backward()
    return runtime.comm is not None and runtime.comm.metrics()["dp"].compressed > 0


@pytest.mark.slow
@pytest.mark.parametrize("own_hook", [False, True])
def test_ddp_is_found_in_a_compiled_model_and_a_hook_of_its_own_is_named(own_hook: bool) -> None:
    assert all(on_ranks(2, compiled_behind_ddp, own_hook))


def summed_by_replicas(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    said = heard_warnings()
    model = fully_shard(Small(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    with ssdtrain.attach(model, {"comm": {"dp": "int8", "min_bytes": 0, "probe": False}}) as runtime:
        for step in range(3):
            model(values(step, 64 * 4).view(4, 64)).sum().backward()
            runtime.step_end()
    return said


def test_sums_that_fsdp2_makes_by_itself_are_named() -> None:
    (replicas, nothing), other = on_ranks(2, summed_by_replicas)
    assert "HSDP" in replicas and "uncompressed" in replicas
    assert "comm.dp is configured, and nothing of it was sent in the first 3 steps" in nothing
    assert other == []


def stage_of_a_pipeline(rank: int) -> tuple[int, list[str]]:
    """Each of two stages reduces the gradients of its own two ranks, in a loop that announces no steps."""
    said = heard_warnings()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first = rank < 2
    model = DistributedDataParallel(nn.Linear(64, 64), process_group=groups[rank // 2])
    config = {"comm": {"dp": "int8", "min_bytes": 0, "probe": False}, "report": {"interval": 0}}
    runtime = ssdtrain.attach(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        if first:
            output = model(values(step, 64 * 4).view(4, 64))
            dist.send(output.detach(), rank + 2)
            dist.recv(gradient := torch.empty(4, 64), rank + 2)
            output.backward(gradient)
        else:
            dist.recv(given := torch.empty(4, 64), rank - 2)
            model(given.requires_grad_()).sum().backward()
            dist.send(given.grad, rank - 2)
        optimizer.step()
    return runtime.comm.steps, [text for text in said if "step_end" in text]


@pytest.mark.slow
def test_stages_of_a_pipeline_do_not_wait_for_each_other_and_are_told_to_announce_steps() -> None:
    found = on_ranks(4, stage_of_a_pipeline)
    assert [steps for steps, _ in found] == [0] * 4
    assert [len(said) for _, said in found] == [1, 0, 0, 0]


def scaled(rank: int) -> Any:
    """The scaler of a loop that announces no steps, and the scale at which residuals are kept, in each backward."""
    model = DistributedDataParallel(Small())
    with ssdtrain.attach(
        model, {"comm": {"dp": "int8", "feedback": "int8", "min_bytes": 0, "probe": False}}
    ) as runtime:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-60)
        runtime.comm.loss_scale = scaler.get_scale
        found = []
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(values(step, 64 * 4).view(4, 64)).square().sum()).backward()
            found.append((scaler.get_scale(), runtime.comm.feedback.scale))
            scaler.step(optimizer)
            scaler.update()
    return found


def test_a_step_that_a_scaler_skips_changes_the_scale_of_the_next_residuals() -> None:
    """The optimizer does not step, so nothing ends the step of the collectives."""
    for found in on_ranks(2, scaled):
        assert [scale for scale, _ in found] == [2.0**126, 2.0**66, 2.0**66]
        assert all(seen == scale for scale, seen in found)
