"""Which blocks a plan may recompute, as an integration names them to `Runtime`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ssdtrain.config import ConfigError, ConfigIssue, PlanConfig
from ssdtrain.config.codecs import OFF
from ssdtrain.profile.blocks import find_blocks, names_a_module
from ssdtrain.profile.modules import plain_name

__all__ = ["PlanBlocks", "check_patterns", "recomputable_blocks"]

_PLAIN = "the model is compiled, has no ModuleList (or plan.blocks) without repeats, or its blocks gather sharded parameters"


@dataclass(frozen=True)
class PlanBlocks:
    """What the section `plan` may decide about block by block on this rank.

    Attributes:
        blocks: by the qualified names that policies see. Empty: the plan keeps and offloads only, by region.
        why: there are none, as a clause.
        compress: the plan may choose compressed inputs of linear layers.
        group: of the ranks that recompute the same blocks, because these communicate with each other: a process group of torch.
            None: a block that communicates is never recomputed.
        empty_stage: this rank is a pipeline stage without any of the blocks that other stages have: it has nothing to plan for.
        remedy: what gives activations more of the device, and cannot be done while training, as the end of a line of the log.
    """

    blocks: Mapping[str, nn.Module] = field(default_factory=dict)
    why: str = _PLAIN
    compress: bool = False
    group: Any = None
    empty_stage: bool = False
    remedy: str = ""


def check_patterns(model: nn.Module, plan: PlanConfig) -> None:
    """Raises ConfigError: `plan.blocks` names no module of `model`."""
    if plan.blocks and not names_a_module(model, plan.blocks):
        why = f"names no module of {type(model).__name__}"
        allowed = 'patterns of their qualified names such as "layers.*", or leaving the key out'
        raise ConfigError([ConfigIssue("ssdtrain.plan.blocks", list(plan.blocks), why, allowed)])


def recomputable_blocks(model: nn.Module, plan: PlanConfig) -> dict[str, nn.Module] | None:
    """The blocks of a model in plain PyTorch that a plan may recompute (or compress), by the names that policies see.

    Returns:
        None where there are none: the model is compiled (or its blocks) or has none, a module is several blocks, a block gathers
        sharded parameters or communicates in its forward (which ranks with other plans would not), or the config switches it off.

    Raises:
        ConfigError: `plan.blocks` names no module.
    """
    check_patterns(model, plan)
    if (plan.recompute == "off" and not plan.compress and plan.encode == OFF) or any(
        _is_compiled(module) for module in model.modules()
    ):
        return None
    try:
        found = find_blocks(model, plan.blocks)
    except ValueError:
        return None
    if len(set(found.values())) < len(
        found
    ):  # a layer that is in the list several times has one name for policies
        return None
    if any(isinstance(block, torch.jit.ScriptModule) or _gathers(block) for block in found.values()):
        return None
    return {plain_name(name): block for name, block in found.items()}


def _gathers(block: nn.Module) -> bool:
    """Whether parameters may be gathered, or partial results reduced, inside of the block's `forward`.

    FSDP2 gathers the block that it is applied to in hooks around it, over a mesh of one dimension. Any other sharded parameter
    (tensor parallelism, FSDP inside of the block) makes the block's forward communicate. What communicates by hand is seen
    while it runs: `ssdtrain.planner.recompute.purity.Collectives`.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    inner = (module for module in block.modules() if module is not block)
    if isinstance(block, FullyShardedDataParallel) or any(
        isinstance(module, FSDPModule | FullyShardedDataParallel) for module in inner
    ):
        return True
    sharded = [parameter for parameter in block.parameters() if isinstance(parameter, DTensor)]
    return any(not isinstance(block, FSDPModule) or one.device_mesh.ndim > 1 for one in sharded)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
