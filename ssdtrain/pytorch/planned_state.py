"""Options of FSDP2's `fully_shard` for model state where a plan of `ssdtrain plan` puts it."""

from __future__ import annotations

from typing import Any

import torch

from ssdtrain.planner.planned_state import PlannedState

__all__ = ["fully_shard_options"]


def fully_shard_options(file: str) -> list[dict[str, Any]]:
    """Return the keyword arguments of `fully_shard` for each transformer block, in the order of the model.

    Blocks that the plan leaves on the device keep their gathered weights from forward to backward (under ZeRO-3 as many of them
    as take the planned bytes); the state of the others is in host memory, where the optimizer steps it.

    Example:
        for block, options in zip(model.layers, fully_shard_options("plan.json"), strict=True):
            fully_shard(block, **options)
        fully_shard(model)

    Raises:
        ConfigError: the file cannot be read.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    state = PlannedState.read(file, "file")
    whole = state.persistent // state.ranks if state.zero >= 3 else state.persistent
    options: list[dict[str, Any]] = []
    for number in range(state.blocks):
        stays = state.place == "device" or number < state.persistent
        one: dict[str, Any] = {"reshard_after_forward": not (number < whole and stays)}
        if not stays:
            one["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        options.append(one)
    return options
