"""The section `state` that `plan.state_limit` stands for in a loop of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn

from ssdtrain.config import Config, ConfigError, ConfigIssue, StateConfig, exact_size
from ssdtrain.config.load import beside_state
from ssdtrain.features import Placement
from ssdtrain.pytorch.models import check_unwrapped
from ssdtrain.state.find import check
from ssdtrain.state.sizes import state_bytes
from ssdtrain.storage.budget import check_host_budget
from ssdtrain.storage.pieces import image_bytes

_KEY = "ssdtrain.plan.state_limit"

FROM_OFFLOAD = ("directories", "threads", "engine", "direct", "verify")
"""Keys of the section `offload` that are taken over."""


def place_state(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer | None, place: Placement
) -> Config:
    """Return the config with the section `state` that `plan.state_limit` stands for. Chunks go to the drives of `offload`, of
    whose `capacity` they have half; without drives to host memory, as much as they take.

    Raises:
        ConfigError: the config has another limit, or the model or its optimizer cannot be served.
        HostBudgetExceeded: without drives: this node has no room for it.
    """
    plan, offload = config.plan, config.offload
    if not config.plans or plan is None or plan.state_limit is None:
        return config
    for key, given in (("state", config.state is not None), ("plan.device_limit", plan.device_limit)):
        if given:
            why = f"is beside {key}, and in plain PyTorch one limit is for model state and activations"
            raise ConfigError.of(_KEY, exact_size(plan.state_limit), why, "one of the two")
    keys = {} if offload is None else {key: getattr(offload, key) for key in FROM_OFFLOAD}
    section = StateConfig.model_validate({"host": "1GiB"}).model_copy(
        update={**keys, "device_limit": plan.state_limit, "blocks": plan.blocks, "host": 0}
    )
    try:
        check_unwrapped(model)
        optimizer = check(model, optimizer, section)
    except ConfigError as error:
        limit = exact_size(plan.state_limit)
        issues = [ConfigIssue(_KEY, limit, f"{one.value} {one.why}", one.allowed) for one in error.problems]
        raise ConfigError(issues) from None
    if offload is not None and offload.capacity is not None:
        section = section.model_copy(update={"capacity": offload.capacity // 2})
        offload = offload.model_copy(update={"capacity": offload.capacity - offload.capacity // 2})
    if not section.directories:
        host = _slot_bytes(model, optimizer)
        offload = offload and beside_state(offload, host, place.local_world_size)
        beside = 0 if offload is None else offload.host + (offload.buffer or 0)
        subject = f"{_KEY} without drives (all of the model state) and ssdtrain.offload"
        check_host_budget(host + beside, place.local_world_size, subject=subject)
        section = section.model_copy(update={"host": host})
    plan = plan.model_copy(update={"state_limit": None})
    return config.model_copy(update={"plan": plan, "offload": offload, "state": section})


def _slot_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the most that parameters, gradients and optimizer state take in slots.

    Raises:
        RuntimeError: the optimizer cannot be tried.
    """
    needed = state_bytes(optimizer)
    return sum(
        image_bytes(nbytes) + image_bytes(1)
        for parameter in model.parameters()
        for nbytes in (parameter.nbytes, parameter.nbytes, needed.get(parameter, 0))
    )
