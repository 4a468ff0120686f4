"""The features that offload activations and plan for them, as a config asks for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ssdtrain.compact.feature import CompactLinear
from ssdtrain.config import Amount, Config, ConfigError, ConfigIssue, OffloadConfig
from ssdtrain.config.codecs import OFF
from ssdtrain.config.units import KiB, MiB
from ssdtrain.features import Feature, Placement
from ssdtrain.messages import report
from ssdtrain.metrics import MetricSet
from ssdtrain.offload.checkpoint import checkpoint
from ssdtrain.offload.feature import ActivationOffload
from ssdtrain.offload.free_codec import codec_seconds
from ssdtrain.offload.policy import OffloadPolicy
from ssdtrain.planner.blocks import Blocks
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.execute import BlockPolicy
from ssdtrain.planner.finder import Goal
from ssdtrain.planner.joint import StateProfile, same_drives
from ssdtrain.planner.model.types import Link
from ssdtrain.planner.plan_blocks import PlanBlocks
from ssdtrain.planner.plan_metrics import PlanMetrics
from ssdtrain.planner.plans import EQUAL
from ssdtrain.planner.regions import AdaptivePolicy, Regions
from ssdtrain.planner.subject import PlanSubject
from ssdtrain.state.feature import ModelState
from ssdtrain.storage import Faults

__all__ = ["offload_features"]

logger = logging.getLogger("ssdtrain")

RECORDED_FROM = 4 * KiB
"""Bytes of the smallest saved tensor that a plan by blocks knows of, whatever `offload.min_bytes` is."""


def offload_features(
    config: Config,
    place: Placement,
    *,
    policy: OffloadPolicy | None = None,
    plan_blocks: PlanBlocks | None = None,
    compact: CompactLinear | None = None,
    state: ModelState | None = None,
    faults: Faults | None = None,
    staged: bool | None = None,
    reports: bool = False,
) -> tuple[ActivationOffload, list[Feature]]:
    """Offloading, and what plans for it, for `offload.amount: "auto"` or with a plan.

    Args:
        config: has an offload section or a plan; directories exist.
        policy, plan_blocks, faults, staged: see `Runtime`.
        compact: whose compression a plan may choose, see `plan.compress`.
        state: of which a plan decides what stays on the device; None: there is no such section.
        reports: log what was planned.

    Raises:
        ConfigError: a plan has nothing to choose from.
        ValueError: there is a policy beside a plan.
        OSError: see `ActivationOffload`.
    """
    plan = config.plan if config.plans else None
    followed: OffloadPolicy | None = policy
    named = PlanBlocks(why="its integration names none") if plan_blocks is None else plan_blocks
    idle = named.empty_stage and config.offload is None
    if plan is not None:
        _check_plan(config, named, policy, reports)
        least = 0 if config.offload is None else config.offload.min_bytes
        codec = None if plan.encode == OFF else plan.encode
        followed = BlockPolicy({}, least=least, codec=codec) if named.blocks or idle else AdaptivePolicy()
    elif policy is None and config.offload is not None and config.offload.amount.kind == "auto":
        followed = AdaptivePolicy()
    plot = None
    if plan is not None and plan.plot:
        directory = config.report.expand(rank=place.rank, local_rank=place.local_rank)
        plot = None if directory is None else directory / f"plan-rank-{place.rank}.png"
    offload = ActivationOffload(
        config.offload or _records_only(place),
        place,
        policy=followed,
        faults=faults,
        staged=staged,
        planned=plan is not None,
    )
    if followed is policy:
        return offload, []
    if isinstance(followed, BlockPolicy):
        offload.engine.eligible.record_from(RECORDED_FROM)
    try:
        return offload, [_planning(config, offload, followed, named, compact, state, plot, reports)]
    except BaseException:
        offload.close()
        raise


def _records_only(place: Placement) -> OffloadConfig:
    """Make the offload section of a plan without tiers, or of a baseline: the engine records what is saved, and moves nothing."""
    buffer = None if place.device.type == "cpu" else 4 * MiB  # pinned, and made at start
    return OffloadConfig(
        host=MiB, amount=Amount("fraction", 0.0), min_bytes=RECORDED_FROM, buffer=buffer, in_flight=MiB
    )


def _planning(
    config: Config,
    offload: ActivationOffload,
    policy: OffloadPolicy | None,
    named: PlanBlocks,
    compact: CompactLinear | None,
    state: ModelState | None,
    plot: Path | None,
    reports: bool,
) -> Feature:
    plan = config.plan if config.plans else None
    if not named.blocks and config.offload is None:
        logger.warning(
            "ssdtrain.plan: nothing is planned on this rank, because %s; if all ranks say so, no stage has such blocks: correct "
            "plan.blocks, or add an offload section",
            named.why,
        )
        return _EmptyStage(named.why)
    subject: PlanSubject
    if isinstance(policy, BlockPolicy):
        assert plan is not None
        exact, tiers = checkpoint.exact(config.checkpoint), config.offload is not None
        lossy = compact if plan.compress else None
        measured = None if state is None else _profile_of(state, config, offload)
        seconds = (0.0, 0.0)
        if plan.encode != OFF:
            seconds = codec_seconds(plan.encode, offload.engine.eligible.device)
        subject = Blocks(
            plan,
            offload,
            policy,
            named,
            exact,
            compact=lossy,
            tiers=tiers,
            state=measured,
            codec_seconds=seconds,
        )
    else:
        assert isinstance(policy, AdaptivePolicy) and config.offload is not None
        limited, strict = plan is None and config.offload.device_budget is not None, plan is not None
        note = f"\n  no block is recomputed: {named.why}" if strict else ""
        subject = Regions(offload.engine, policy, limited=limited, strict=strict, note=note)
    endures = config.offload is not None and config.offload.endurance is not None
    return PlanController(
        offload.engine,
        offload.store,
        subject,
        goal_of(config, by_blocks=isinstance(subject, Blocks)),
        endurance=offload.endurance if endures else None,
        reports=reports,
        plot=plot,
    )


def _profile_of(state: ModelState, config: Config, offload: ActivationOffload) -> StateProfile:
    """Measure `state`, whose hooks the engine does not take for the model's computation."""
    state.beside = offload.engine.aside
    link = offload.engine.device.link_bandwidth()
    mine = [] if config.offload is None else [drive.path for drive in offload.store.metrics.drives]
    shared = bool(mine) and same_drives([Path(one) for one in mine], state.directories)
    return StateProfile(state, "ssd" if shared else "state", None if link is None else Link(*link))


def goal_of(config: Config, *, by_blocks: bool) -> Goal:
    """What a config asks of plans: the section `plan`, or without it `offload.device_budget`."""
    if not config.plans or config.plan is None:
        assert config.offload is not None
        budget = config.offload.device_budget
        return Goal.of_budget(budget)
    plan = config.plan
    if config.state is not None:
        limit = config.state.device_limit
        memory = plan.memory if plan.objective is not None else limit is None
        slowdown = plan.slowdown if memory else plan.max_slowdown
        return Goal(limit, "state.device_limit", memory, slowdown, plan.max_slowdown)
    hidden = 0.0 if by_blocks else EQUAL if plan.slowdown is None else min(EQUAL, plan.slowdown)
    return Goal(
        plan.device_limit,
        memory=plan.memory,
        slowdown=plan.slowdown,
        most_slowdown=plan.max_slowdown,
        hidden=hidden,
    )


class _EmptyStage(Feature):
    """Stands for a `PlanController` on a rank that has nothing to plan for: its metrics are reduced over all ranks."""

    def __init__(self, why: str) -> None:
        self._why, self._metric = why, PlanMetrics()

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return [("plan", self._metric)]

    def description(self) -> str:
        return f"plan: nothing to plan for, because {self._why}"


def _check_plan(config: Config, named: PlanBlocks, policy: OffloadPolicy | None, reports: bool) -> None:
    assert config.plan is not None
    if policy is not None:
        raise ValueError("the config has a plan, which decides what is offloaded: leave it or the policy out")
    why = f"can recompute no block here: {named.why}"
    if config.plan.compress and not (named.blocks and named.compress):
        reason = named.why if named.compress else "only ssdtrain.attach has that in this version"
        allowed = "leaving it out: what compact says is compressed everywhere"
        text = f"can compress no block here: {reason}"
        raise ConfigError([ConfigIssue("ssdtrain.plan.compress", True, text, allowed)])
    if config.state is not None and not named.blocks:
        text = f"finds no block to decide about: {named.why}"
        allowed = "plan.blocks that name the modules of state.blocks, or no plan beside state"
        raise ConfigError([ConfigIssue("ssdtrain.plan", config.plan.mode, text, allowed)])
    if named.blocks or named.empty_stage:
        return
    if config.plan.encode != OFF:
        allowed = '"off", or offload.codec for what leaves'
        text = f"can encode no block here: {named.why}"
        raise ConfigError([ConfigIssue("ssdtrain.plan.encode", config.plan.encode, text, allowed)])
    if config.plan.recompute == "on":
        raise ConfigError([ConfigIssue("ssdtrain.plan.recompute", "on", why, '"auto" or "off"')])
    if config.offload is None:
        allowed = "an offload section, whose tiers the plan uses"
        raise ConfigError(
            [ConfigIssue("ssdtrain.plan", config.plan.mode, f"{why}, and there is no tier", allowed)]
        )
    if config.plan.recompute == "auto" and reports:
        report(f"plan: keep and offload only, because it {why}")
