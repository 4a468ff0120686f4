"""The plan of a problem under the limits of a config, and on a device under what fits.

Note: [Without a limit of the user's]
The lowest peak within its time may be more than the device has beside the model, though the profiled steps, which offload
everything, did fit. Then what fits is the limit (`DeviceHeadroom`), and the shortest step within it is chosen. What fits
is an estimate: where no plan does, the nearest one is followed, with a warning.

Note: [What may stay on a device]
Without a budget of the user's, a plan keeps what cannot be hidden. But more was offloaded while steps were profiled, and may have
to be for the job to fit. So on a device a plan's peak is bounded by what is free beside everything else: the model, the states of
optimizers, and what comes and goes inside of operators.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ssdtrain.config.units import format_size
from ssdtrain.device import CudaDevice
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.planner.explain import alternatives
from ssdtrain.planner.joint import best_with_state
from ssdtrain.planner.model.types import DEVICE, StepTimeline
from ssdtrain.planner.plans import EQUAL, HIDDEN, Limits, NoPlan, Objective, Plan, SearchProblem
from ssdtrain.planner.search import search

__all__ = ["DeviceHeadroom", "DeviceMemory", "FoundPlans", "Goal", "PlanFinder"]

logger = logging.getLogger("ssdtrain")

LEFT_FREE = 0.05
"""Fraction of the device's memory that is left for fragments and what grows later."""


@dataclass(frozen=True)
class Goal:
    """What a config asks of a plan.

    Attributes:
        limit: bytes of activations, at most; None: no limit.
        key: of that limit, in the config.
        memory: minimise the peak within `slowdown`, instead of the time within the limit.
        slowdown: predicted step time over that of keeping everything, minus 1, at most; None: no limit.
        most_slowdown: the same where what fits on the device asks for more.
        hidden: slowdown that counts as none.
        strict: a first plan that does not keep to the limit is an error; else the nearest one is followed.
    """

    limit: int | None = None
    key: str = "plan.device_limit"
    memory: bool = False
    slowdown: float | None = None
    most_slowdown: float | None = None
    hidden: float = 0.0
    strict: bool = True

    @classmethod
    def of_budget(cls, nbytes: int | None) -> Goal:
        """The goal of `offload.device_budget`: the shortest step within it, or without one the lowest peak that costs no time."""
        key = "offload.device_budget"
        if nbytes is None:
            return cls(key=key, memory=True, slowdown=HIDDEN, hidden=EQUAL, strict=False)
        return cls(nbytes, key, hidden=EQUAL, strict=False)


@dataclass(frozen=True)
class FoundPlans:
    """The best plans, best first, and what they were searched under."""

    plans: Sequence[Plan]
    limits: Limits
    objective: Objective

    def alternatives(self, problem: SearchProblem) -> list[tuple[str, Plan | None]]:
        """See `ssdtrain.planner.explain.alternatives`."""
        return alternatives(problem, self.limits, self.objective, self.plans[0].actions)


class DeviceMemory(NamedTuple):
    """Bytes of a device."""

    total: int
    foreign: int
    """Bytes of other processes, of CUDA's own, and of libraries that allocate past torch."""
    allocated: int
    """Bytes of torch's tensors, now."""
    most_allocated: int
    """The same at most, since somebody reset it."""


class DeviceHeadroom:
    """Bytes that activations may take at most. See Note: [What may stay on a device].

    Args:
        remedy: see `PlanBlocks`.
    """

    def __init__(self, engine: OffloadEngine, remedy: str = "") -> None:
        self._engine, self._remedy = engine, remedy
        self._transient = 0  # the most that was allocated beside the model and the activations
        self._warned = False

    def __call__(self) -> int | None:
        """Between steps; None: the device has no memory of its own. Does not wait for the device."""
        memory = self.memory()
        if memory is None:
            return None
        now = self._engine.snapshot()
        return self.left(memory, now.activation_bytes, now.activation_peak_bytes)

    def exceeded(self, room: int, why: NoPlan) -> None:
        """No plan stays under `room` bytes, and the nearest one is followed: said once."""
        if not self._warned:
            self._warned = True
            too_large = why.limits.device is not None and why.smallest.peak > why.limits.device
            logger.warning(
                "ssdtrain.plan: about %s of the device are left for activations, and the plan that is nearest to it is "
                "followed, because %s%s",
                format_size(room),
                why,
                self._remedy if too_large else "",  # else memory is enough, and time or endurance is not
            )

    def memory(self) -> DeviceMemory | None:
        """Read what a CUDA device's memory holds now; None: it is no CUDA device."""
        if not isinstance(self._engine.device, CudaDevice):
            return None
        device = self._engine.device.device
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(
            total,
            max(0, total - free - torch.cuda.memory_reserved(device)),
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
        )

    def left(self, memory: DeviceMemory, live: int, peak: int) -> int:
        """Where activations take `live` bytes now and took `peak` at most so far."""
        others = memory.allocated - live
        self._transient = max(self._transient, memory.most_allocated - others - peak)
        left_free = int(LEFT_FREE * memory.total)
        return max(0, memory.total - memory.foreign - others - self._transient - left_free)


class PlanFinder:
    """Searches for one model.

    Args:
        goal: the limits and the objective.
        engine: of the device.
        remedy: see `PlanBlocks`.
    """

    def __init__(self, goal: Goal, engine: OffloadEngine, remedy: str = "") -> None:
        self.goal = goal
        self._headroom = DeviceHeadroom(engine, remedy)

    def find(
        self, problem: SearchProblem, kept: StepTimeline, larger: float = 1.0, rate: float | None = None
    ) -> FoundPlans:
        """The best plans.

        Args:
            kept: the step that keeps everything.
            larger: size of the largest forward over that of the problem's: the limit of the device, or what fits, has to hold it.
            rate: see `Limits`.

        Raises:
            NoPlan: none keeps to the limits of the config.
        """
        goal = self.goal
        device = None if goal.limit is None else int(goal.limit / larger)
        limits = Limits(device, seconds=_most_seconds(kept, goal.slowdown), rate=rate)
        objective = Objective(0, 1) if goal.memory else self._shortest(problem, kept)
        found = FoundPlans(_search(problem, limits, objective), limits, objective)
        room = self._headroom() if goal.limit is None else None
        if room is None or larger * found.plans[0].peak <= room:
            return found
        limits = Limits(int(room / larger), seconds=_most_seconds(kept, goal.most_slowdown), rate=rate)
        objective = self._shortest(problem, kept)
        try:
            return FoundPlans(_search(problem, limits, objective), limits, objective)
        except NoPlan as error:
            self._headroom.exceeded(room, error)
            return FoundPlans([error.nearest], replace(limits, device=None), Objective(0, 1))

    def _shortest(self, problem: SearchProblem, kept: StepTimeline) -> Objective:
        if problem.undecided:
            return Objective()  # keeping everything saved is slow where it leaves no memory for model state
        return Objective(hidden=kept.seconds * (1 + self.goal.hidden))


def _search(
    problem: SearchProblem, limits: Limits, objective: Objective, effort: float = 1.0
) -> Sequence[Plan]:
    """The best plans of `search`, among them always the best one that moves nothing: of many blocks only some plans are tried,
    and tiers must not make the answer worse."""
    if problem.undecided:
        return best_with_state(
            problem, lambda left, part: _search(left, limits, objective, part), limits, objective
        )
    staying = {name: choice for name, choice in problem.actions.items() if choice.tier == DEVICE}
    if len(staying) == len(problem.actions) or len(staying) == 1:
        return search(problem, limits, objective, effort=effort)
    try:
        moves_nothing = replace(problem, actions=staying)
        known = search(moves_nothing, limits, objective, runners_up=0, effort=effort)[0]
    except NoPlan as error:
        known = error.nearest
    return search(problem, limits, objective, known=known.actions, effort=effort)


def _most_seconds(kept: StepTimeline, slowdown: float | None) -> float | None:
    return None if slowdown is None else kept.seconds * (1 + slowdown)
