"""The section `state` that a plan adds to a loop of plain PyTorch, where a limit or the GPU is smaller than model state."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ssdtrain.config import Config, ConfigError, ConfigIssue, StateConfig, exact_size
from ssdtrain.config.units import format_size
from ssdtrain.features import Placement
from ssdtrain.pytorch.models import check_unwrapped
from ssdtrain.state.find import check
from ssdtrain.state.sizes import state_bytes
from ssdtrain.storage.budget import check_host_budget
from ssdtrain.storage.errors import HostBudgetExceeded
from ssdtrain.storage.pieces import image_bytes

__all__ = ["place_state"]

logger = logging.getLogger("ssdtrain")

_KEY = "ssdtrain.plan.state_limit"

SHARE = 0.8
"""The part of a GPU's memory for model state and activations; the rest is for buffers, copies of autocast, and fragments."""

OPTIMIZER_MOST = 12
"""Bytes of an optimizer for an element, without looking at it: a copy in float32 and two values."""

FROM_OFFLOAD = ("directories", "capacity", "threads", "engine", "direct", "verify")
"""Keys of the section `offload` that are taken over."""


def place_state(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer | None, place: Placement
) -> Config:
    """Return the config with a section `state` if `plan.state_limit` says so, or if parameters, gradients and optimizer state do
    not fit into the GPU. Chunks go to the drives of `offload`, without these to host memory, as much as they take.

    Raises:
        ConfigError: under `plan.state_limit`: the config has another limit, or the model or its optimizer cannot be served.
        HostBudgetExceeded: under `plan.state_limit`, without drives: this node has no room for it.
    """
    plan = config.plan
    if not config.plans or plan is None or plan.file is not None:
        return config
    if plan.state_limit is None:
        if config.state is not None or optimizer is None or place.device.type != "cuda":
            return config
        try:
            check_unwrapped(model)
        except ConfigError:
            return config  # which shards it, and has options for where it is
        memory = torch.cuda.get_device_properties(place.device).total_memory
        if (
            sum(2 * parameter.nbytes + OPTIMIZER_MOST * parameter.numel() for parameter in model.parameters())
            <= memory
        ):
            return config
        try:
            if _state_bytes(model, optimizer)[0] <= memory:
                return config
            return _with_state(config, int(SHARE * memory), model, optimizer, place)
        except (ConfigError, HostBudgetExceeded, RuntimeError) as error:
            logger.warning(
                "ssdtrain.plan: by the model's shapes its state does not fit on the GPU, and it stays as it is configured: %s",
                error,
            )
            return config
    for key, given in (("state", config.state is not None), ("plan.device_limit", plan.device_limit)):
        if given:
            why = f"is beside {key}, and in plain PyTorch one limit is for model state and activations"
            raise ConfigError([ConfigIssue(_KEY, exact_size(plan.state_limit), why, "one of the two")])
    return _with_state(config, plan.state_limit, model, optimizer, place)


def _with_state(
    config: Config, limit: int, model: nn.Module, optimizer: torch.optim.Optimizer | None, place: Placement
) -> Config:
    keys = {} if config.offload is None else {key: getattr(config.offload, key) for key in FROM_OFFLOAD}
    section = StateConfig.model_validate({"host": "1GiB"}).model_copy(update={**keys, "device_limit": limit})
    check_unwrapped(model)
    total, away = _state_bytes(model, check(model, optimizer, section))
    host = 0 if section.directories else away
    check_host_budget(
        host, place.local_world_size, subject="ssdtrain.plan: model state off the device, without drives"
    )
    logger.info(
        "ssdtrain.plan: model state takes %s: it is in chunks, with activations within %s, and the rest of it %s (docs/state.md)",
        format_size(total),
        format_size(limit),
        "on the drives of offload" if section.directories else "in host memory",
    )
    plan = None if config.plan is None else config.plan.model_copy(update={"state_limit": None})
    return config.model_copy(update={"plan": plan, "state": section.model_copy(update={"host": host})})


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of parameters, gradients and optimizer state, and the most that slots of them take.

    Raises:
        RuntimeError: the optimizer cannot be tried.
    """
    needed = state_bytes(optimizer)
    total = slots = 0
    for parameter in model.parameters():
        parts = (
            parameter.nbytes,
            parameter.nbytes if parameter.requires_grad else 0,
            needed.get(parameter, 0),
        )
        total += sum(parts)
        slots += sum(image_bytes(part) + image_bytes(1) for part in parts)
    return total, slots
