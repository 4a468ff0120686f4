"""Which blocks of an engine's model `plan` may recompute: those of a plain module, or the layers of a pipeline stage."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import ssdtrain
from ssdtrain.config import Config, ConfigError, ConfigIssue, PlanConfig
from ssdtrain.integration.patching import Patches
from ssdtrain.integration.random_trackers import register_trackers
from ssdtrain.planner.measured_blocks import set_parameter_shapes
from ssdtrain.planner.plan_blocks import PlanBlocks, recomputable_blocks
from ssdtrain.profile.blocks import names_a_module
from ssdtrain_ds import _compat
from ssdtrain_ds.block import BLOCK_KEY
from ssdtrain_ds.planned_state import ZERO_SECTION, with_less_state

_RUNNING = "deepspeed: modules whose forwards run"


def plan_blocks(engine: Any, config: Config, written: Mapping[str, Any]) -> PlanBlocks | None:
    """What the plan of `config` may recompute; None where there is no plan.

    Args:
        engine: initialised by DeepSpeed.
        written: the whole DeepSpeed config.
    """
    plan = config.plan if config.plans else None
    if plan is None:
        return None
    why = _why_none(engine, config, written)
    if why:
        return PlanBlocks(why=why)
    if _compat.is_pipeline(engine) and not plan.blocks:
        return _of_stage(engine, plan)
    if _is_stage_without(engine, plan.blocks):
        return PlanBlocks(why="plan.blocks names no module of this pipeline stage", empty_stage=True)
    blocks = recomputable_blocks(engine.module, plan) or {}
    for block in blocks.values():
        set_parameter_shapes(block, map(_compat.full_shape, block.parameters()))
    _restore_modules_of_forward(engine)
    group = None if config.compresses else _compat.gathering_group(engine)
    return PlanBlocks(blocks, group=group, remedy=with_less_state(written.get(ZERO_SECTION) or {}))


def _of_stage(engine: Any, plan: PlanConfig) -> PlanBlocks:
    """The layers of a pipeline stage, each in one place. Of a tied layer its other stages have a copy: it is none of them."""
    layers, why = _compat.layers_of(engine.module), "the stage has no layer that is a module of its own"
    if not layers:
        return PlanBlocks(why=why, empty_stage=_compat.stages_of(engine) > 1)
    found = recomputable_blocks(engine.module, plan.model_copy(update={"blocks": tuple(layers)}))
    return PlanBlocks(found or {}, why=why)


def _is_stage_without(engine: Any, patterns: Sequence[str]) -> bool:
    """True for one of several pipeline stages in which these patterns name nothing."""
    several = _compat.is_pipeline(engine) and _compat.stages_of(engine) > 1
    return several and not names_a_module(engine.module, patterns)


def _restore_modules_of_forward(engine: Any) -> None:
    """Have recomputations put back ZeRO-3's list of the modules whose forwards run: torch ends them early by an exception, past
    the hooks that take modules off again, and each would leave some behind."""
    stack = _compat.running_modules(engine)
    if stack is not None:
        restore = functools.partial(stack.__setitem__, slice(None))
        ssdtrain.checkpoint.register_random_state(_RUNNING, stack.copy, restore)


def _why_none(engine: Any, config: Config, written: Mapping[str, Any]) -> str:
    """Why no block of the engine may be recomputed; "": some may."""
    if config.plan is not None and config.plan.recompute == config.plan.encode == "off":
        return "plan.recompute is off"
    if config.compact is not None:
        return "compact compresses what its linear layers save (with a plan that recomputes: not in this version)"
    if not _compat.is_plain_engine(engine):
        return f"{type(engine).__name__} runs its model in its own way"
    block = written.get("activation_checkpointing")
    if _compat.checkpointing_is_configured() or (isinstance(block, dict) and any(block.values())):
        return "DeepSpeed's activation checkpointing is configured, which recomputes already"
    # That of the config reaches the module after this.
    section = written.get("pipeline")
    configured = isinstance(section, dict) and section.get("activation_checkpoint_interval")
    if _compat.is_pipeline(engine) and (configured or _compat.checkpoint_interval(engine)):
        return "activation_checkpoint_interval has the pipeline recompute its layers already"
    zero = written.get("zero_optimization")
    if isinstance(zero, dict) and (zero.get("zenflow") or _super_offload(zero)):
        return "ZenFlow and SuperOffload were never run with recomputed blocks"
    if _compat.has_experts(engine):
        return "the model has DeepSpeed's experts, whose dispatch a second run would change"
    if _compat.has_random_ltd(engine):
        return "random layer token drop hands tokens from layer to layer beside their inputs"
    if _compat.communicates_past_torch(engine):
        return "DeepSpeed communicates by a backend other than torch.distributed, and what blocks send is not seen"
    return register_trackers()


def _super_offload(zero: Mapping[str, Any]) -> bool:
    section = zero.get("offload_optimizer")
    return isinstance(section, dict) and bool(section.get("super_offload"))


def reject_compile(patches: Patches, engine: Any, problem: ConfigIssue) -> None:
    """Make `engine.compile` an error with this problem."""

    def compile_is_rejected(plain: Any) -> Any:
        def compile(*_: Any, **__: Any) -> None:
            raise ConfigError([problem])

        return compile

    patches.replace(engine, "compile", compile_is_rejected)


HAS_NO_BLOCKS = ConfigIssue(
    f"{BLOCK_KEY}.plan",
    "auto",
    "decides about the blocks of the model, which engine.compile(...) would compile into one",
    '"recompute": "off" in the plan, which then offloads by region, or no engine.compile',
)
"""Problem of a compiled model, while a plan decides about blocks."""

NEVER_ENDS = ConfigIssue(
    f"{BLOCK_KEY}.offload",
    "on",
    "meets engine.compile(...) of a model that DeepSpeed's AutoTP divides: torch does not finish to trace its layers where "
    "saved-tensor hooks are, also without SSDTrain",
    "no engine.compile, or the block without offload",
)
"""Seen with torch 2.13 and DeepSpeed 0.19.8."""
