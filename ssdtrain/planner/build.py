"""The features that offload activations and plan for them, as a config asks for them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ssdtrain.compact.feature import CompactLinear
from ssdtrain.config import Config, ConfigError, OffloadConfig, Problem
from ssdtrain.config.units import KiB, MiB
from ssdtrain.features import Feature, Placement
from ssdtrain.offload.checkpoint import checkpoint
from ssdtrain.offload.feature import ActivationOffload
from ssdtrain.offload.policy import OffloadPolicy
from ssdtrain.planner.adaptive import AdaptivePolicy
from ssdtrain.planner.auto import AutoPlan
from ssdtrain.planner.controller import AdaptiveOffload
from ssdtrain.planner.execute import BlockPolicy
from ssdtrain.storage import Faults
from ssdtrain.telemetry.messages import report

__all__ = ["offload_features"]


def offload_features(
    config: Config,
    place: Placement,
    *,
    policy: OffloadPolicy | None = None,
    plan_blocks: Mapping[str, nn.Module] | None = None,
    compact: CompactLinear | None = None,
    faults: Faults | None = None,
    staged: bool | None = None,
    timeline: bool = False,
    reports: bool = False,
) -> list[Feature]:
    """Offloading, and what plans for it, for `offload.amount: "auto"` or with a plan.

    Args:
        config: has an offload section or a plan; directories exist.
        policy, plan_blocks, faults, staged, timeline: see `Runtime`.
        compact: whose compression a plan may choose, see `plan.compress`.
        reports: log what was planned.

    Raises:
        ConfigError: a plan has nothing to choose from.
        ValueError: there is a policy beside a plan.
        OSError: see `ActivationOffload`.
    """
    plan = config.plan if config.plans else None
    followed: OffloadPolicy | None = policy
    if plan is not None:
        _check_plan(config, plan_blocks, policy, reports)
        followed = AdaptivePolicy() if plan_blocks is None else BlockPolicy({})
    elif policy is None and config.offload is not None and config.offload.amount.kind == "auto":
        followed = AdaptivePolicy()
    offload = ActivationOffload(
        config.offload or _records_only(place),
        place,
        policy=followed,
        faults=faults,
        staged=staged,
        timeline=timeline,
        planned=plan is not None,
    )
    if followed is policy:
        return [offload]
    try:
        return [offload, _planning(config, offload, followed, plan_blocks or {}, compact, reports)]
    except BaseException:
        offload.close()
        raise


def _records_only(place: Placement) -> OffloadConfig:
    """Of a plan without tiers: the engine records what is saved and when, and moves nothing."""
    buffer = None if place.device.type == "cpu" else 4 * MiB  # pinned, and made at start
    return OffloadConfig(host=MiB, min_bytes=4 * KiB, buffer=buffer, in_flight=MiB)


def _planning(
    config: Config,
    offload: ActivationOffload,
    policy: OffloadPolicy | None,
    blocks: Mapping[str, nn.Module],
    compact: CompactLinear | None,
    reports: bool,
) -> Feature:
    plan = config.plan if config.plans else None
    if isinstance(policy, BlockPolicy):
        assert plan is not None
        exact, tiers = checkpoint.exact(config.checkpoint), config.offload is not None
        lossy = compact if plan.compress else None
        return AutoPlan(plan, offload, policy, blocks, exact, compact=lossy, tiers=tiers, reports=reports)
    assert isinstance(policy, AdaptivePolicy) and config.offload is not None
    return AdaptiveOffload(
        offload.engine,
        offload.store,
        policy,
        device_budget=config.offload.device_budget if plan is None else plan.device_limit,
        endurance=offload.endurance if config.offload.endurance is not None else None,
        must_fit=plan is not None,
        slack=None if plan is None else plan.slowdown,
        most_slowdown=None if plan is None else plan.max_slowdown,
        least_memory=plan is not None and plan.memory,
        reports=reports,
    )


def _check_plan(
    config: Config, blocks: Mapping[str, nn.Module] | None, policy: OffloadPolicy | None, reports: bool
) -> None:
    assert config.plan is not None
    if policy is not None:
        raise ValueError("the config has a plan, which decides what is offloaded: leave it or the policy out")
    if blocks is not None:
        return
    why = (
        "can recompute no block here: only ssdtrain.attach does, for a model in plain PyTorch that is not compiled, has a "
        "ModuleList (or plan.blocks) without repeats, and whose blocks gather no sharded parameters"
    )
    if config.plan.compress:
        allowed = "leaving it out: what compact says is compressed everywhere"
        raise ConfigError(
            [Problem("ssdtrain.plan.compress", True, why.replace("recompute", "compress"), allowed)]
        )
    if config.plan.recompute == "on":
        raise ConfigError([Problem("ssdtrain.plan.recompute", "on", why, '"auto" or "off"')])
    if config.offload is None:
        allowed = "an offload section, whose tiers the plan uses"
        raise ConfigError(
            [Problem("ssdtrain.plan", config.plan.mode, f"{why}, and there is no tier", allowed)]
        )
    if config.plan.recompute == "auto" and reports:
        report(f"plan: keep and offload only, because it {why}")
