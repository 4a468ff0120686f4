"""Where an engine that is being made holds model state: by a plan's file, or by what the model's shapes say about a limit.

Nothing is measured for the latter. DeepSpeed steps on CPUs what is not on the device, and its links are those of all placements,
so that of two the one with more on the device is the faster.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from ssdtrain import ranks
from ssdtrain.config import Config, ConfigError, ConfigIssue, PlanConfig
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import format_size
from ssdtrain.planner.planned_state import PlannedState
from ssdtrain.profile.blocks import find_blocks
from ssdtrain.storage.budget import check_host_budget
from ssdtrain.storage.errors import HostBudgetExceeded
from ssdtrain_ds import _compat
from ssdtrain_ds.block import BLOCK_KEY
from ssdtrain_ds.planned_state import ZERO_SECTION, planned_section

logger = logging.getLogger("ssdtrain")

_KEY = f"{BLOCK_KEY}.plan.state_limit"

BUFFERS = 2
"""Blocks whose weights are gathered at a time: one computes while the next one comes."""

ADAM_LIKE = ("adam", "lamb", "adan")
"""Words in the names of optimizers that have two values for each parameter."""


def place_state(
    config: Config, config_class: Any, written: dict[str, Any], model: torch.nn.Module, optimizer: Any
) -> dict[str, Any]:
    """Have the engine that is being made hold model state where the plan puts it. Returns the config with that.

    Args:
        written: the whole DeepSpeed config.
        optimizer: that `deepspeed.initialize` was given; None: that of the config.

    Raises:
        ConfigError: the config says otherwise, the model has been partitioned already as something else says, or there is no
            room for model state. Where nobody has asked for a place (`"plan": "auto"` alone) that is a warning, and model state
            stays as it is configured; all ranks come to the same.
        HostBudgetExceeded: this node has no room for it.
    """
    plan = config.plan
    if plan is None:
        return written
    try:
        section = _planned(plan, config_class, written, model, optimizer)
    except ConfigError as error:
        if plan.file is not None or plan.state_limit is not None:
            raise
        logger.warning(
            "ssdtrain.plan: by the model's shapes its state does not fit on the GPU, and it stays as it is configured: %s",
            error,
        )
        return written
    if section is None:
        return written
    _compat.set_zero_section(config_class, section)
    return {**written, ZERO_SECTION: section}


def _planned(
    plan: PlanConfig, config_class: Any, written: dict[str, Any], model: torch.nn.Module, optimizer: Any
) -> dict[str, Any] | None:
    """Return the section `zero_optimization` of a plan; None: it stays as it is."""
    if plan.file is not None:
        key, value = f"{BLOCK_KEY}.plan.file", plan.file
        state: PlannedState | None = PlannedState.read(plan.file, key)
    else:
        key, value = _KEY, "default" if plan.state_limit is None else format_size(plan.state_limit)
        state = _within_limit(plan, config_class, written, model, optimizer)
    if state is None:
        return None
    section = planned_section(state, written, value, key)
    if section != written.get(ZERO_SECTION) and _compat.is_partitioned(model):
        why = "comes too late for a model that deepspeed.zero.Init has partitioned as its own config says"
        allowed = (
            f'that config with "{ZERO_SECTION}": {json.dumps(section)}, as ssdtrain plan --apply writes it'
        )
        raise ConfigError.of(key, value, why, allowed)
    return section


def _within_limit(
    plan: PlanConfig, config_class: Any, written: Mapping[str, Any], model: torch.nn.Module, optimizer: Any
) -> PlannedState | None:
    """The plan for `plan.state_limit`; None: model state stays as it is configured."""
    section = written.get(ZERO_SECTION) or {}
    memory = None
    if plan.state_limit is None:
        asked = section.get("stage") == 3 and not _is_offloaded(section)
        memory = _compat.device_memory() if asked else None
        if memory is None:
            return None
    try:
        blocks = list(find_blocks(model, plan.blocks).values())
    except ValueError as error:
        if plan.state_limit is None:
            return None
        raise ConfigError([_issue(plan, str(error), "plan.blocks that name modules")]) from error
    # 1. What there is. Weights of 16 bits have a copy of 32 bits beside the optimizer's state.
    itemsize = 2 if _is_enabled(written, "bf16") or _is_enabled(written, "fp16") else 4
    elements = {parameter: math.prod(_compat.full_shape(parameter)) for parameter in model.parameters()}
    trained = sum(number for parameter, number in elements.items() if parameter.requires_grad)
    each = [sum(elements[parameter] for parameter in block.parameters()) for block in blocks]
    others = trained * (itemsize + (4 if itemsize == 2 else 0) + _optimizer_bytes(optimizer, written))
    total = sum(elements.values()) * itemsize + others
    # Ranks that have parts of a sequence share weights too.
    shards = int(config_class.world_size) * int(written.get("sequence_parallel_size") or 1)
    if plan.state_limit is None and memory is not None and total // shards <= memory:
        return None
    # 2. Where it goes.
    limit = plan.state_limit if plan.state_limit is not None else (memory or 0) // 2
    state = PlannedState(
        place="device",
        zero=3,
        ranks=shards,
        blocks=len(blocks),
        persistent=len(blocks),
        buffers=BUFFERS,
        block_parameters=max(each),
        outer_parameters=max(0, sum(elements.values()) - sum(each)),
        largest_parameter=max(elements.values()),
        cpu_optimizer=False,
    )
    try:
        state = state.within(limit, itemsize, others)
    except InvalidValue as error:
        raise ConfigError([_issue(plan, error.why, error.allowed)]) from None
    if not state.optimizer_away:
        return state if plan.state_limit is not None else None
    if isinstance(optimizer, torch.optim.Optimizer) and not _steps_on_cpus(optimizer, written):
        why = f"has the optimizer step on CPUs, and deepspeed.initialize was given {type(optimizer).__name__}"
        allowed = 'DeepSpeedCPUAdam, or "zero_force_ds_cpu_optimizer": false in the config'
        raise ConfigError([_issue(plan, why, allowed)])
    # 3. Whether the node has room for it.
    weights = state.away * state.blocks * state.block_parameters * itemsize
    away = int(others + weights) // shards
    try:
        check_host_budget(away, ranks.local_world_size(), subject="ssdtrain.plan: model state off the device")
    except HostBudgetExceeded as error:
        raise HostBudgetExceeded(f"{error}; or use drives: ssdtrain plan --state ssd --apply") from error
    logger.info(
        "ssdtrain.plan: of %s of model state for each rank %s are in host memory, where CPUs step it; weights of %d of %d blocks "
        "stay on the device, within %s",
        format_size(total // shards),
        format_size(away),
        state.persistent,
        state.blocks,
        format_size(limit),
    )
    return state


def _issue(plan: PlanConfig, why: str, allowed: str) -> ConfigIssue:
    limit = "half of the GPU" if plan.state_limit is None else format_size(plan.state_limit)
    return ConfigIssue(_KEY, limit, why, allowed)


def _is_offloaded(section: Mapping[str, Any]) -> bool:
    """True where the config itself says where model state is."""
    inner = (section.get(name) for name in ("offload_param", "offload_optimizer"))
    return any(isinstance(one, Mapping) for one in inner)


def _steps_on_cpus(optimizer: torch.optim.Optimizer, written: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed takes the optimizer for parameters in host memory."""
    return (
        type(optimizer).__name__ == "DeepSpeedCPUAdam" or written.get("zero_force_ds_cpu_optimizer") is False
    )


def _is_enabled(written: Mapping[str, Any], name: str) -> bool:
    section = written.get(name)
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _optimizer_bytes(optimizer: Any, written: Mapping[str, Any]) -> int:
    """Bytes of optimizer state for a parameter, in float32, without a copy of the parameter."""
    section = written.get("optimizer")
    name = section.get("type", "") if isinstance(section, Mapping) else ""
    name = str(name if optimizer is None else type(optimizer).__name__).lower()
    return 8 if any(word in name for word in ADAM_LIKE) and "8bit" not in name else 0
