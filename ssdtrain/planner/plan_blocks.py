"""Which blocks a plan may recompute, as an integration names them to `Runtime`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ssdtrain.config import ConfigError, ConfigIssue, PlanConfig
from ssdtrain.profile.blocks import names_a_module

__all__ = ["PlanBlocks", "check_patterns"]

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
    """

    blocks: Mapping[str, nn.Module] = field(default_factory=dict)
    why: str = _PLAIN
    compress: bool = False
    group: Any = None
    empty_stage: bool = False


def check_patterns(model: nn.Module, plan: PlanConfig) -> None:
    """Raises ConfigError: `plan.blocks` names no module of `model`."""
    if plan.blocks and not names_a_module(model, plan.blocks):
        why = f"names no module of {type(model).__name__}"
        allowed = 'patterns of their qualified names such as "layers.*", or leaving the key out'
        raise ConfigError([ConfigIssue("ssdtrain.plan.blocks", list(plan.blocks), why, allowed)])
