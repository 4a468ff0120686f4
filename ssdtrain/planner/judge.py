"""Which of two plans is better: each is played once by the cost model (`play`), and scored under limits and an objective."""

from __future__ import annotations

from collections.abc import Sequence

from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, SearchProblem, play

__all__ = ["Judge", "first_written", "written"]

Score = tuple[float, ...]


class Judge:
    """Plays plans of one problem.

    Attributes:
        decided: numbers of the blocks that plans decide about.
        plans: that were played, by their actions.
        best: of these; None: there are none yet.
    """

    def __init__(self, problem: SearchProblem, limits: Limits, objective: Objective) -> None:
        self.problem, self.limits, self.objective = problem, limits, objective
        self.blocks, self.decided = problem.blocks, problem.decided
        self.plans: dict[tuple[str, ...], Plan] = {}
        self.best: Plan | None = None
        always, blocks = problem.always, list(enumerate(self.blocks))
        self._begin = ["recompute" if number in always else "keep" for number, _ in blocks]
        self._never = {
            (number, name)
            for name, action in problem.actions.items()
            for number, block in blocks
            if (action.recompute and number in problem.impure)
            or (action.compress and block.compressed is None)
            or (action.encode and block.encoded is None)
        }

    def plan(self, chosen: Sequence[str]) -> Plan:
        """The plan in which the decided blocks have the actions `chosen`, in their order."""
        names = list(self._begin)
        for number, name in zip(self.decided, chosen, strict=True):
            names[number] = "keep" if (number, name) in self._never else name
        key = tuple(names)
        known = self.plans.get(key)
        if known is None:
            known = play(self.problem, key)
            self.add(known)
        return known

    def kept(self) -> Plan:
        """The plan that keeps every block that is decided about."""
        return self.plan(["keep"] * len(self.decided))

    def add(self, plan: Plan) -> None:
        """Count a plan among those that were played."""
        self.plans[plan.actions] = plan
        if self.best is None or self.score(plan) < self.score(self.best):
            self.best = plan

    def score(self, plan: Plan) -> Score:
        """Smaller is better."""
        value = self.objective.value(plan)
        # Memory that is there may be used; without a limit less is better.
        ties = (plan.peak, plan.written) if self.limits.device is None else (plan.written, plan.peak)
        return self.excess(plan), value, plan.count("compress"), *ties, plan.seconds

    def excess(self, plan: Plan) -> float:
        """Return by how much it breaks the limits, relative to them; 0: it keeps to them."""
        limits, total = self.limits, 0.0
        most = None if limits.rate is None else limits.rate * plan.seconds
        for value, limit in (
            (plan.peak, limits.device),
            (plan.written, limits.written),
            (plan.seconds, limits.seconds),
            (first_written(plan), most),
        ):
            if limit is not None and value > limit * (1 + 1e-9):
                total += (value - limit) / max(limit, 1e-12)
        return total

    def in_time(self, plan: Plan, seconds: float | None) -> bool:
        """Whether it takes at most so many seconds, and writes no faster than it may."""
        rate = self.limits.rate
        if rate is not None and first_written(plan) > rate * plan.seconds:
            return False
        return seconds is None or plan.seconds <= seconds

    @property
    def by_time(self) -> bool:
        """Time is all that counts within the limits."""
        return not (self.objective.memory or self.objective.wear)

    def unbeatable(self, kept: Plan) -> bool:
        """Whether the best plan so far takes no longer than computation alone, and time is all that counts."""
        if self.best is None or self.excess(self.best) or not self.by_time:
            return False
        return self.best.seconds <= max(self.objective.hidden, kept.seconds) * (1 + 1e-6)

    def ranked(self) -> list[Plan]:
        """All plans that were played, best first."""
        return sorted(self.plans.values(), key=lambda plan: (self.score(plan), plan.actions))

    def kinds(self) -> list[Plan]:
        """The best plan of each sum of actions, best first."""
        found: dict[tuple[str, ...], Plan] = {}
        for plan in self.ranked():
            found.setdefault(tuple(sorted(plan.actions)), plan)
        return list(found.values())

    def within(self) -> list[Plan]:
        """The plans of `kinds` that keep to the limits.

        Raises:
            NoPlan: none does.
        """
        found = [plan for plan in self.kinds() if self.excess(plan) == 0]
        if found:
            return found
        # A drive is given no more than it takes in any case; keeping everything writes nothing.
        plans = [plan for plan in self.ranked() if self.in_time(plan, None)]
        # Of what has the same peak by the model the plan that lets more go is safer, whatever time it takes.
        kept = 1 if self.problem.only_moves else 0
        smallest = min(plans, key=lambda plan: (plan.peak, kept * plan.count("keep")))
        limit = self.limits.device
        fitting = [plan for plan in plans if limit is not None and plan.peak <= limit]
        nearest = min(fitting, key=lambda plan: plan.seconds, default=smallest)
        raise NoPlan(smallest, self.limits, self.blocks, self.problem.machine.buffers, nearest)


def written(plan: Plan) -> int:
    """Bytes written to all tiers."""
    return sum(plan.timeline.written.values())


def first_written(plan: Plan) -> int:
    """Bytes written to the first tier."""
    return next(iter(plan.timeline.written.values()), 0)
