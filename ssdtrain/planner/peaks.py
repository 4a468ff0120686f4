"""The peak of a plan, whatever the speed of the drive.

On a device with a link, tensors leave at points of the tape, and the peak depends on the plan alone. Without one (CPU) a tensor
leaves when its write has ended, which other work on the drive and on the processors may delay. What does not depend on time is
how many bytes of stores may be under way (`Machine.in_flight`): forward waits for more. So the peak lies between that of a drive
that ends every store at once and that of one which ends none before forward waits for it. Limits are compared with the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ssdtrain.planner.plans import Problem
from ssdtrain.planner.step import DEVICE, Choice, StepTimeline
from ssdtrain.planner.timeline import simulate

__all__ = ["highest_peak", "lowest_peak", "play"]

SLOWER = 1e4
"""Than measured: a write then takes longer than a step. As much faster: it takes no time."""


def play(problem: Problem, choices: Sequence[Sequence[Choice]]) -> StepTimeline:
    """The time line of a plan, with the highest of its possible peaks."""
    found = simulate(problem.chunks, choices, problem.order, problem.machine, steps=problem.steps)
    if _depends_on_time(problem, choices):
        found.peak_bytes = max(found.peak_bytes, highest_peak(problem, choices))
    return found


def highest_peak(problem: Problem, choices: Sequence[Sequence[Choice]]) -> int:
    """Bytes: no store ends before forward waits for it."""
    return _peak(problem, choices, 1 / SLOWER)


def lowest_peak(problem: Problem, choices: Sequence[Sequence[Choice]]) -> int | None:
    """Bytes: every store ends as soon as it begins. None: the peak does not depend on the drive."""
    return _peak(problem, choices, SLOWER) if _depends_on_time(problem, choices) else None


def _depends_on_time(problem: Problem, choices: Sequence[Sequence[Choice]]) -> bool:
    stored = any(choice.tier != DEVICE for chosen in choices for choice in chosen)
    return stored and problem.machine.link is None


def _peak(problem: Problem, choices: Sequence[Sequence[Choice]], faster: float) -> int:
    tiers = tuple(replace(tier, write=faster * tier.write) for tier in problem.machine.tiers)
    machine = replace(problem.machine, tiers=tiers)
    return simulate(problem.chunks, choices, problem.order, machine, steps=problem.steps).peak_bytes
