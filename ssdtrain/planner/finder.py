"""The plan of a problem under the limits of a config, and on a device under what fits.

Note: [Without a limit of the user's]
The lowest peak within `max_slowdown` may be more than the device has beside the model, though the profiled steps, which offload
everything, did fit. Then what fits is the limit (`ssdtrain.planner.room`), and the shortest step within it is chosen. What fits
is an estimate: where no plan does, the nearest one is followed, with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ssdtrain import ranks
from ssdtrain.config import ConfigError, ConfigIssue, PlanConfig
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.planner.explain import alternatives
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, Problem
from ssdtrain.planner.room import Room
from ssdtrain.planner.search import search
from ssdtrain.planner.step import DEVICE, StepTimeline
from ssdtrain.planner.timeline import kept_step

__all__ = ["FoundPlans", "PlanFinder", "why_none"]


@dataclass(frozen=True)
class FoundPlans:
    """The best plans, best first, and what they were searched under."""

    plans: Sequence[Plan]
    limits: Limits
    objective: Objective

    def alternatives(self, problem: Problem) -> list[tuple[str, Plan | None]]:
        """See `ssdtrain.planner.explain.alternatives`."""
        return alternatives(problem, self.limits, self.objective)


class PlanFinder:
    """Searches for one model.

    Args:
        config: has the limits and the objective.
        engine: of the device.
    """

    def __init__(self, config: PlanConfig, engine: OffloadEngine) -> None:
        self.config = config
        self._room = Room(engine)

    def find(self, problem: Problem, kept: StepTimeline, largest: int = 0) -> FoundPlans:
        """The best plans.

        Args:
            kept: the step that keeps everything.
            largest: bytes of the largest forward, if it was larger than those of the problem: the limit of the device, or what
                fits, has to hold it.

        Raises:
            NoPlan: none keeps to the limits of the config.
        """
        config = self.config
        saved = sum(block.saved + block.small for block in problem.blocks)
        larger = max(1.0, largest / saved) if saved else 1.0
        device = None if config.device_limit is None else int(config.device_limit / larger)
        limits = Limits(device, seconds=_most_seconds(kept, config.slowdown))
        objective = Objective(0, 1) if config.memory else Objective()
        found = FoundPlans(_search(problem, limits, objective), limits, objective)
        room = self._room() if config.device_limit is None else None
        if room is None or larger * found.plans[0].peak <= room:
            return found
        limits = Limits(int(room / larger), seconds=_most_seconds(kept, config.max_slowdown))
        try:
            return FoundPlans(_search(problem, limits, Objective()), limits, Objective())
        except NoPlan as error:
            self._room.exceeded(room, error)
            return FoundPlans([error.nearest], replace(limits, device=None), Objective(0, 1))

    def check_recompute(self, problem: Problem, impure: Mapping[str, str]) -> None:
        """Call it before the first plan.

        Args:
            impure: the blocks that must not run again, and why.

        Raises:
            ConfigError: the config says that blocks are recomputed, and none can be.
        """
        if self.config.recompute != "on" or "recompute" in problem.actions:
            return
        text = f"can recompute no block{ranks.on_this_rank()}: {': '.join(why_none(impure))}"
        raise ConfigError([ConfigIssue("ssdtrain.plan.recompute", "on", text, '"auto" or "off"')])

    def recomputed(self, problem: Problem, impure: Mapping[str, str], largest: int = 0) -> list[str]:
        """Names of the blocks that the best plan recomputes. Arguments and errors: see `check_recompute` and `find`."""
        self.check_recompute(problem, impure)
        try:
            plan = self.find(problem, kept_step(problem), largest).plans[0]
        except NoPlan as error:
            raise error.named() from None
        chosen = zip(problem.blocks, plan.actions, strict=True)
        return [block.name for block, action in chosen if action == "recompute"]


def _search(problem: Problem, limits: Limits, objective: Objective) -> Sequence[Plan]:
    """The best plans of `search`, among them always the best one that moves nothing: of many blocks only some plans are tried,
    and tiers must not make the answer worse."""
    staying = {name: choice for name, choice in problem.actions.items() if choice.tier == DEVICE}
    if len(staying) == len(problem.actions):
        return search(problem, limits, objective)
    try:
        known = search(replace(problem, actions=staying), limits, objective, runners_up=0)[0]
    except NoPlan as error:
        known = error.nearest
    return search(problem, limits, objective, known=known.actions)


def why_none(impure: Mapping[str, str]) -> tuple[str, str]:
    """The name of a block that must not run again, and why, of all these."""
    return next(iter(impure.items()), ("the model", "none of its blocks ran"))


def _most_seconds(kept: StepTimeline, slowdown: float | None) -> float | None:
    return None if slowdown is None else kept.seconds * (1 + slowdown)
