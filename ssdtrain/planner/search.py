"""The best plan under limits: which action for which block.

Note: [How plans are searched]
Few blocks are tried out completely. With more, plans of a shape are tried, as in ProTrain (arXiv 2406.08334): so many blocks are
recomputed, so many offloaded, the last ones kept, in five layouts (offloaded blocks spread among the recomputed ones, so that
their transfers hide; these spread among them; spread over all; offloaded blocks first; after the recomputed ones). For each
number of recomputed blocks the smallest number of offloaded ones that fits into memory is found by bisection, beginning with the
number last found. In one shape the number of recomputed blocks is narrowed down; all shapes are tried at it; the number is
narrowed down again in the best of them; then every twelfth number is tried in all shapes. Numbers whose computation alone takes
longer than the best plan so far are left out. The best of these plans are then improved by changing one or two blocks.
Every plan is judged by the one cost model (`simulate`). The number of simulations is bounded, not their time, so that the same
question gets the same answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, Problem
from ssdtrain.planner.step import DEVICE, Pass
from ssdtrain.planner.timeline import simulate
from ssdtrain.planner.untraced import untraced

__all__ = ["search"]

EXACT = 3000
"""Plans at most that are all tried."""

STARTS = 24
"""Plans that are improved one block at a time."""

PAIRS = 16
"""Blocks at most of which two are changed at a time too."""

BLOCK_PASSES = 400_000
"""Of a search, in all simulations: some seconds."""


@untraced
def search(
    problem: Problem,
    limits: Limits | None = None,
    objective: Objective | None = None,
    *,
    exact: int = EXACT,
    runners_up: int = 3,
    effort: float = 1.0,
    known: Sequence[str] | None = None,
) -> list[Plan]:
    """The best plans, best first: see Note: [How plans are searched].

    Args:
        exact: try all plans where there are at most so many.
        runners_up: how many more than the best, each of another sum of actions.
        effort: part of the simulations that are spent. A plan found with fewer is among those found with more.
        known: actions of a plan for a similar problem, which is tried first.

    Raises:
        NoPlan: none keeps to the limits.
    """
    searched = _Search(problem, limits or Limits(), objective or Objective(), effort)
    if known is not None and problem.actions.keys() >= set(known):
        searched.plan([known[number] for number in searched.decided])
    return searched.run(exact, runners_up)


Score = tuple[float, ...]


class _Search:
    def __init__(self, problem: Problem, limits: Limits, objective: Objective, effort: float) -> None:
        self.problem, self.limits, self.objective = problem, limits, objective
        self.blocks = problem.blocks
        self.decided = problem.decided
        self.plans: dict[tuple[str, ...], Plan] = {}
        self.best: Plan | None = None
        passes = sum(len(problem.chunks[p.chunk]) for p in problem.order if p.kind != "idle")
        self.simulations = max(int(effort * BLOCK_PASSES) // max(passes, 1), 50)
        self.tiers = [name for name, choice in problem.actions.items() if choice.tier != DEVICE]
        self.found: dict[str, int] = {}  # numbers of offloaded blocks by the limit that they keep to
        # What a tier holds between forward and backward.
        self.room = {tier.name: tier.capacity for tier in problem.machine.tiers}

    def run(self, exact: int, runners_up: int) -> list[Plan]:
        names = list(self.problem.actions)
        if len(names) ** len(self.decided) <= exact:
            for chosen in itertools.product(names, repeat=len(self.decided)):
                self.plan(chosen)
        else:
            kept = self.plan(["keep"] * len(self.decided))
            if self.excess(kept) or self.objective.memory or self.objective.wear:
                self.shapes()
                if not self.unbeatable(kept):
                    for start in self.starts():
                        self.improve(start)
        ranked = self.ranked()
        if self.excess(ranked[0]) > 0:
            raise self.none_fits(ranked)
        found: list[Plan] = []
        seen: set[tuple[str, ...]] = set()
        for plan in ranked:
            kinds = tuple(sorted(plan.actions))
            if kinds not in seen and self.excess(plan) == 0:
                seen.add(kinds)
                found.append(plan)
        return found[: 1 + runners_up]

    def none_fits(self, plans: Sequence[Plan]) -> NoPlan:
        smallest = min(plans, key=lambda plan: plan.peak)
        limit = self.limits.device
        within = [plan for plan in plans if limit is not None and plan.peak <= limit]
        nearest = min(within, key=lambda plan: plan.seconds, default=smallest)
        return NoPlan(smallest, self.limits, self.blocks, self.problem.machine.buffers, nearest)

    # Judging

    def plan(self, chosen: Sequence[str]) -> Plan:
        """The plan in which the decided blocks have the actions `chosen`, in their order."""
        always = self.problem.always
        names = ["recompute" if number in always else "keep" for number in range(len(self.blocks))]
        for number, name in zip(self.decided, chosen, strict=True):
            action = self.problem.actions[name]
            never = action.recompute and number in self.problem.impure
            never |= action.compress and self.blocks[number].compressed is None
            names[number] = "keep" if never else name
        key = tuple(names)
        known = self.plans.get(key)
        if known is None:
            of = self.problem
            timeline = simulate(of.chunks, of.choices(key), of.order, of.machine, steps=of.steps)
            known = self.plans[key] = Plan(key, timeline)
            if self.best is None or self.score(known) < self.score(self.best):
                self.best = known
        return known

    def excess(self, plan: Plan) -> float:
        """By how much it breaks the limits, relative to them; 0: it keeps to them."""
        limits, total = self.limits, 0.0
        for value, limit in (
            (plan.peak, limits.device),
            (plan.written, limits.written),
            (plan.seconds, limits.seconds),
        ):
            if limit is not None and value > limit * (1 + 1e-9):
                total += (value - limit) / max(limit, 1e-12)
        return total

    def score(self, plan: Plan) -> Score:
        """Smaller is better."""
        objective = self.objective
        value = objective.time * plan.seconds + objective.memory * plan.peak + objective.wear * plan.written
        # Memory that is there may be used; without a limit less is better.
        ties = (plan.peak, plan.written) if self.limits.device is None else (plan.written, plan.peak)
        lossy = sum(self.problem.actions[name].lossy for name in plan.actions)
        return self.excess(plan), value, lossy, *ties, plan.seconds

    def ranked(self) -> list[Plan]:
        return sorted(self.plans.values(), key=lambda plan: (self.score(plan), plan.actions))

    def unbeatable(self, kept: Plan) -> bool:
        """Whether the best plan so far takes no longer than computation alone, and time is all that counts."""
        if self.best is None or self.excess(self.best) or self.objective.memory or self.objective.wear:
            return False
        return self.best.seconds <= kept.seconds * (1 + 1e-6)

    @property
    def exhausted(self) -> bool:
        return len(self.plans) >= self.simulations

    # Shapes

    def shapes(self) -> None:
        """Ever closer numbers of recomputed blocks in one shape; all shapes at the best number; the same in the best shape; then
        every twelfth number in all shapes."""
        fillings, assignments = self.fillings(), self.assignments()
        shapes = list(itertools.product(fillings, assignments, LAYOUTS if self.tiers else LAYOUTS[:1]))
        shape = fillings[0], assignments[-1], LAYOUTS[0]
        count = len(self.decided)
        recompute = "recompute" in self.problem.actions and not self.problem.impure.issuperset(self.decided)
        most = count if recompute else 0
        for _ in range(2):
            step = max(1, count // 4)
            for number in range(0, most + 1, step):
                self.of_shape(number, shape)
            while step > 1:
                step, near = (step + 1) // 2, self.recomputed()
                for number in (near - step, near + step):
                    if 0 <= number <= most:
                        self.of_shape(number, shape)
            near = self.recomputed()
            for other in shapes:
                before = self.best
                self.of_shape(near, other)
                if self.best is not before:
                    shape = other
        for number in range(0, most + 1, max(1, count // 12)):
            for shape in shapes:
                self.of_shape(number, shape)

    def recomputed(self) -> int:
        """Blocks, in the best plan so far."""
        return 0 if self.best is None else sum(self.best.actions[n] == "recompute" for n in self.decided)

    def too_slow(self, recomputed: int) -> bool:
        """Whether its computation alone takes longer than the best plan."""
        best = self.best
        if self.exhausted or best is None or self.objective.memory or self.objective.wear:
            return self.exhausted
        if self.excess(best) > 0:
            return False
        cheapest = sorted(self.blocks[number].recompute for number in self.decided)[:recomputed]
        passes = sum(1 for one in self.problem.order if one.kind == "backward")
        computing = self.plan(["keep"] * len(self.decided)).timeline.compute_seconds
        return computing + passes * sum(cheapest) > best.seconds * (1 + 1e-9)

    def of_shape(self, recomputed: int, shape: Shape) -> None:
        """Plans with so many recomputed blocks."""
        rest, fill, layout = shape

        def make(offloaded: int) -> Plan:
            chosen = layout(len(self.decided), offloaded, recomputed)
            tiers = fill([i for i, name in enumerate(chosen) if name == "offload"])
            return self.plan(
                [
                    tiers.get(i, "keep") if name == "offload" else rest if name == "keep" else name
                    for i, name in enumerate(chosen)
                ]
            )

        if self.too_slow(recomputed):
            return
        if self.tiers:
            self.bisect(make, len(self.decided) - recomputed)
        else:
            make(0)

    def fillings(self) -> list[str]:
        """What happens to blocks that are neither offloaded nor recomputed."""
        return [
            name
            for name, choice in self.problem.actions.items()
            if choice.tier == DEVICE and not choice.recompute
        ]

    def assignments(self) -> list[Callable[[list[int]], dict[int, str]]]:
        """Ways to spread offloaded blocks over the tiers: one tier for all, or the ones needed soonest (the last) in the first
        tier up to its capacity, the others in the next."""
        found: list[Callable[[list[int]], dict[int, str]]] = [
            lambda blocks, name=name: dict.fromkeys(blocks, name)  # type: ignore[misc]
            for name in self.tiers
        ] or [lambda blocks: {}]
        if len(self.tiers) > 1:
            found.append(self.fill_in_order)
        return found

    def fill_in_order(self, blocks: list[int]) -> dict[int, str]:
        room = {name: self.room.get(name) for name in self.tiers}
        alive = max(_alive(self.problem.order), 1)
        chosen = {}
        for place in reversed(blocks):
            size = self.blocks[self.decided[place]].saved * alive
            for name in self.tiers:
                left = room[name]
                if left is None or left >= size:
                    room[name] = None if left is None else left - size
                    chosen[place] = name
                    break
            else:
                chosen[place] = self.tiers[-1]
        return chosen

    def bisect(self, make: Callable[[int], Plan], most: int) -> None:
        """Try none and all offloaded, the fewest blocks that fit into memory, and the most that fit into the time. Shapes need
        about the same number: the one last found is tried first, then those around it."""
        device, seconds = self.limits.device, self.limits.seconds
        tests: dict[str, Callable[[Plan], bool]] = {}
        if device is not None:
            tests["device"] = lambda plan: plan.peak <= device
        if seconds is not None:
            tests["seconds"] = lambda plan: plan.seconds > seconds
        for number in (0, most) if tests else (0, most // 2, most):
            make(number)
        for name, enough in tests.items():
            if not enough(make(most)):
                continue
            low, high, step = 0, most, 1
            guess = self.found.get(name, most // 2)
            while low < high and not self.exhausted:
                middle = guess if low <= guess < high else (low + high) // 2
                if enough(make(middle)):
                    high, guess = middle, middle - step
                else:
                    low, guess = middle + 1, middle + step
                step *= 2
            self.found[name] = low
            for number in (low - 1, low, low + 1):
                if 0 <= number <= most:
                    make(number)

    # One block at a time

    def starts(self) -> list[Plan]:
        """The best plans that differ in how many blocks have which action."""
        found: dict[tuple[str, ...], Plan] = {}
        for plan in self.ranked():
            found.setdefault(tuple(sorted(plan.actions)), plan)
        return list(found.values())[:STARTS]

    def improve(self, plan: Plan) -> None:
        names = list(self.problem.actions)
        best, better = plan, True
        while better and not self.exhausted:
            better = False
            for candidate in self.neighbours(best, names):
                if self.exhausted:
                    return
                found = self.plan(candidate)
                if self.score(found) < self.score(best):
                    best, better = found, True
                    break

    def neighbours(self, plan: Plan, names: Sequence[str]) -> Iterable[list[str]]:
        """Plans in which one block has another action, two have each other's, or (of few blocks) two have others."""
        present = [plan.actions[number] for number in self.decided]
        for place, name in itertools.product(range(len(present)), names):
            if present[place] != name:
                yield [*present[:place], name, *present[place + 1 :]]
        for first, second in itertools.combinations(range(len(present)), 2):
            if present[first] != present[second]:
                swapped = list(present)
                swapped[first], swapped[second] = swapped[second], swapped[first]
                yield swapped
        if len(present) <= PAIRS:
            for first, second in itertools.combinations(range(len(present)), 2):
                for one, other in itertools.product(names, repeat=2):
                    if one != present[first] and other != present[second]:
                        changed = list(present)
                        changed[first], changed[second] = one, other
                        yield changed


Layout = Callable[[int, int, int], list[str]]
"""(blocks, offloaded, recomputed) to one of "offload", "recompute", "keep" for each block."""


def _offloaded_first(count: int, offloaded: int, recomputed: int) -> list[str]:
    kept = count - offloaded - recomputed
    return ["offload"] * offloaded + ["recompute"] * recomputed + ["keep"] * kept


def _offloaded_after(count: int, offloaded: int, recomputed: int) -> list[str]:
    kept = count - offloaded - recomputed
    return ["recompute"] * recomputed + ["offload"] * offloaded + ["keep"] * kept


def _among_recomputed(count: int, offloaded: int, recomputed: int) -> list[str]:
    kept = count - offloaded - recomputed
    return _spread("offload", offloaded, ["recompute"] * recomputed) + ["keep"] * kept


def _among_offloaded(count: int, offloaded: int, recomputed: int) -> list[str]:
    kept = count - offloaded - recomputed
    return _spread("recompute", recomputed, ["offload"] * offloaded) + ["keep"] * kept


def _over_all(count: int, offloaded: int, recomputed: int) -> list[str]:
    kept = count - offloaded - recomputed
    return _spread("offload", offloaded, ["recompute"] * recomputed + ["keep"] * kept)


LAYOUTS = (_among_recomputed, _among_offloaded, _over_all, _offloaded_first, _offloaded_after)

Shape = tuple[str, Callable[[list[int]], dict[int, str]], Layout]
"""What happens to blocks that are neither offloaded nor recomputed, the tiers of offloaded ones, and the layout."""


def _spread(name: str, count: int, others: list[str]) -> list[str]:
    """`others` in their order, with `count` times `name` at even distances, the first at the front."""
    total = count + len(others)
    rest = iter(others)
    places = {i * total // count for i in range(count)} if count else set()
    return [name if place in places else next(rest) for place in range(total)]


def _alive(order: Sequence[Pass]) -> int:
    """The most microbatches between their forward and their backward at once."""
    alive = most = 0
    for one in order:
        alive += {"forward": 1, "backward": -1}.get(one.kind, 0)
        most = max(most, alive)
    return most
