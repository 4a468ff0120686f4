"""The choice of offloads for blocks that are kept or offloaded, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ssdtrain.device import device_for
from ssdtrain.planner.finder import Goal, PlanFinder
from ssdtrain.planner.model.types import Block, Choice, Machine, Pass, StepTimeline
from ssdtrain.planner.plans import EQUAL, HIDDEN, NoPlan, Plan, kept_step
from ssdtrain.planner.profile import regions_problem


class Offloads(NamedTuple):
    """A plan by regions."""

    plan: Plan
    choices: list[list[Choice]]
    predicted: StepTimeline
    kept: StepTimeline


class NoEngine:
    """Stands for an engine on a CPU, whose memory is no limit."""

    device = device_for(torch.device("cpu"))


def choose_offloads(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    *,
    slack: float = HIDDEN,
    device_budget: int | None = None,
    endurance: float | None = None,
) -> Offloads:
    """What `offload.amount: "auto"` would follow: the nearest plan where none is within the budget."""
    problem = regions_problem(chunks, order, machine)
    kept, rate = kept_step(problem), machine.tiers[0].write
    goal = Goal(device_budget, memory=device_budget is None, hidden=EQUAL)
    if device_budget is None:
        goal = Goal(memory=True, slowdown=slack, hidden=EQUAL)
    engine: Any = NoEngine()
    try:
        rate = rate if endurance is None else min(rate, endurance)
        plan = PlanFinder(goal, engine).find(problem, kept, rate=rate).plans[0]
    except NoPlan as error:
        plan = error.nearest
    return Offloads(plan, problem.choices(plan.actions), plan.timeline, kept)
