"""The best plan under limits: which action for which block.

Note: [How plans are searched]
Few blocks are tried out completely. With more, and where the only question is which of them leave, the first candidate is a
greedy pass: each block in forward order, since what is saved first has the most time, is offloaded if the step then keeps to its
time. So where a tier is slower than the model saves, the offloaded blocks spread over forward at the pace of the tier.

Then plans of a shape are tried, as in ProTrain (arXiv 2406.08334): so many blocks are
recomputed, so many offloaded, the last ones kept, in five layouts (offloaded blocks spread among the recomputed ones, so that
their transfers hide; these spread among them; spread over all; offloaded blocks first; after the recomputed ones). For each
number of recomputed blocks the smallest number of offloaded ones that fits into memory is found by bisection, beginning with the
number last found. In one shape the number of recomputed blocks is narrowed down; all shapes are tried at it; the number is
narrowed down again in the best of them; then every twelfth number is tried in all shapes. Numbers whose computation alone takes
longer than the best plan so far are left out. The best of these plans are then improved by changing one or two blocks.

Where parts of blocks may leave too (`SearchProblem.by_parts`), the blocks that a plan keeps or offloads are cut into units, as
fine as those of a plan by regions (`ssdtrain.planner.parts`), and which of these leave is searched as above: where no block is
recomputed, which is the answer of `offload.amount: "auto"`, and beside the recomputed blocks of the best plans. Whole blocks are
tried from few recomputed ones to many.

Last, where saved tensors are few and large, shares of them are tried, of the best plan's parts: all or nothing of a tensor that
is a tenth of a forward leaves a drive idle, or the peak higher than it has to be. What stays of a block costs copies and is there
twice meanwhile, which the cost model counts: a share is taken where the peak sinks by more than `SHARES_GAIN`.

Every plan is judged by the one cost model (`play`). The number of simulations is bounded, not their time, so that the same
question gets the same answer.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ssdtrain.planner.judge import Judge, written
from ssdtrain.planner.model.types import DEVICE, Block, Pass
from ssdtrain.planner.parts import cut_blocks
from ssdtrain.planner.plans import EQUAL, HIDDEN, Limits, Objective, Plan, SearchProblem, play
from ssdtrain.planner.shares import LargeShares

__all__ = ["search"]

EXACT = 3000
"""Number of plans up to which all are tried."""

STARTS = 24
"""Number of plans that are improved one block at a time."""

STARTS_BESIDE_PARTS = 6
"""The same where parts of blocks may leave: which do, beside the recomputed blocks of these plans, is decided after that."""

PAIRS = 16
"""Number of blocks up to which two are changed at a time too."""

BLOCK_PASSES = 400_000
"""Number of passes of blocks that all simulations of a search play: some seconds."""

MOVES_ONLY = 60_000
"""The same where blocks are only kept or offloaded: some tenths of a second."""

RELAXED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)
"""Slowdowns that the greedy pass allows in turn where a limit of memory asks for more than can be hidden."""

SHARES_GAIN = 0.02
"""Part of the peak of keeping everything by which offloading parts of blocks has to lower it."""


def search(
    problem: SearchProblem,
    limits: Limits | None = None,
    objective: Objective | None = None,
    *,
    exact: int | None = None,
    runners_up: int = 3,
    effort: float = 1.0,
    known: Sequence[str] | None = None,
    greedy: bool = True,
) -> list[Plan]:
    """Find the best plans, best first: see Note: [How plans are searched].

    Args:
        exact: try all plans where there are at most so many; None: `EXACT`.
        runners_up: how many more than the best, each of another sum of actions.
        effort: part of the simulations that are spent. A plan found with fewer is among those found with more.
        known: actions of a plan for a similar problem, which is tried first.
        greedy: begin with the greedy pass, whose simulations grow with the number of blocks whatever `effort` is.

    Raises:
        NoPlan: none keeps to the limits.
    """

    def run() -> list[Plan]:
        judge = Judge(problem, limits or Limits(), objective or Objective())
        searched = _Search(judge, effort, greedy)
        names = {name.partition(":")[0] for name in known or ()}
        if known is not None and problem.actions.keys() | problem.parts.keys() >= names:
            judge.plan([known[number] for number in judge.decided])
        return searched.run(EXACT if exact is None else exact, runners_up)

    if sys.getprofile() is None:
        return run()
    # A profiler that records stacks (`torch.profiler`) would record millions of calls, and take many times as long. It records
    # the threads that were there when it began.
    with ThreadPoolExecutor(1, "ssdtrain-plan") as pool:
        return pool.submit(run).result()


class _Search:
    """The candidates of one problem.

    Args:
        judge: plays them.
        effort, begins_greedily: see `search`.
    """

    def __init__(self, judge: Judge, effort: float, begins_greedily: bool) -> None:
        self.judge, self.problem, self.limits = judge, judge.problem, judge.limits
        self.objective, self.blocks, self.decided = judge.objective, judge.blocks, judge.decided
        self.plan, problem = judge.plan, judge.problem
        lengths = [_length(blocks, in_parts=problem.by_parts) for blocks in problem.chunks]
        self.passes = max(1, problem.steps * sum(lengths[one.chunk] for one in problem.order))
        self.effort, self.begins_greedily = effort, begins_greedily
        effort *= MOVES_ONLY if problem.only_moves else BLOCK_PASSES
        self.simulations = max(int(effort) // self.passes, 50)
        self.tiers = [name for name, choice in problem.actions.items() if choice.tier != DEVICE]
        self.found: dict[str, int] = {}  # numbers of offloaded blocks by the limit that they keep to
        self.cheapest = sorted(self.blocks[number].recompute for number in self.decided)
        self.backwards = sum(one.kind == "backward" for one in problem.order)
        # What a tier holds between forward and backward.
        self.room = {tier.name: tier.capacity for tier in problem.machine.tiers}

    def run(self, exact: int, runners_up: int, *, strict: bool = True) -> list[Plan]:
        """The best plans, best first.

        Args:
            strict: raise NoPlan where none keeps to the limits; else there is none then.
        """
        names, kept = list(self.problem.actions), self.judge.kept()
        every, only_moves = len(names) ** len(self.decided), self.problem.only_moves
        asks = self.judge.excess(kept) > 0 or not self.judge.by_time
        by_parts = self.problem.by_parts and len(self.tiers) == 1 and asks
        if every <= exact and (every <= self.simulations or not only_moves):
            if by_parts or not runners_up:
                self.every_by_recomputed(names, kept, by_parts=by_parts)
            else:
                for chosen in itertools.product(names, repeat=len(self.decided)):
                    self.plan(chosen)
        else:
            if asks:
                if by_parts:
                    self.in_parts_of_blocks(kept)
                if only_moves and self.tiers and self.begins_greedily:
                    self.greedy(kept)
                    self.prune()
                greedy = self.judge.best
                self.shapes()
                if not only_moves and not self.judge.unbeatable(kept):
                    for start in self.judge.kinds()[: STARTS_BESIDE_PARTS if by_parts else STARTS]:
                        self.improve(start)
                if only_moves and self.judge.best is not greedy:
                    self.prune()
        if by_parts and not self.judge.unbeatable(kept):
            self.with_fewer_recomputed()
        if by_parts:
            self.in_parts_of_parts()
        if self.problem.parts and (strict or self.limits.seconds is None or not self.judge.by_time):
            self.in_parts()
        return self.judge.within()[: 1 + runners_up] if strict else []

    @property
    def exhausted(self) -> bool:
        return len(self.judge.plans) >= self.simulations

    def every_by_recomputed(self, names: Sequence[str], kept: Plan, *, by_parts: bool) -> None:
        """Try all plans of whole blocks, the fewest recomputed first, and none whose computation alone takes longer than the
        best. Parts of blocks are tried where none is recomputed, if `by_parts`; then nothing is searched beyond what is as fast
        as computation alone."""
        others = [name for name in names if name != "recompute"]
        count = len(self.decided)
        for recomputed in range(count + 1 if "recompute" in names else 1):
            if self.too_slow(recomputed, self.limits.seconds) or (by_parts and self.judge.unbeatable(kept)):
                return
            for places in itertools.combinations(range(count), recomputed):
                for chosen in itertools.product(others, repeat=count - recomputed):
                    rest = iter(chosen)
                    self.plan(["recompute" if place in places else next(rest) for place in range(count)])
            if by_parts and not recomputed and not self.judge.unbeatable(kept):
                self.in_parts_of_blocks(kept)

    # Parts of blocks

    def in_parts_of_blocks(self, plan: Plan) -> bool:
        """Search over the parts of the blocks that `plan` keeps or offloads, as `offload.amount: "auto"` searches over regions.
        Returns whether what is found is better than all before."""
        cut, before = cut_blocks(self.problem, plan.actions), self.judge.best
        machine, rate = self.problem.machine, self.limits.rate
        write = machine.tiers[0].write
        limits = replace(self.limits, rate=write if rate is None else min(rate, write))
        if self.judge.by_time and before is not None and not self.judge.excess(before):
            limits = replace(limits, seconds=before.seconds)
        kept = play(cut.problem, ["keep"] * len(cut.begin))
        if limits.seconds is not None and self.moving(kept) > limits.seconds:
            return False
        hidden = max(self.objective.hidden, (1 + EQUAL) * kept.seconds)
        cases = [(limits, replace(self.objective, hidden=hidden))]
        # What does not fit in hardly more time may be the lowest peak in little more.
        if self.judge.by_time and limits.device is not None:
            most = (1 + HIDDEN) * kept.seconds
            most = most if limits.seconds is None else min(most, limits.seconds)
            cases.append((replace(limits, device=None, seconds=most), Objective(0, 1)))
        for within, objective in cases:
            judge = Judge(cut.problem, within, objective)
            judge.plan([cut.begin[number] for number in judge.decided])
            _Search(judge, self.effort, self.begins_greedily).run(EXACT, 0, strict=False)
            assert judge.best is not None
            self.judge.add(play(self.problem, cut.joined(judge.best.actions)))
            if judge.excess(judge.best) or judge.best.seconds <= hidden:
                break
        return self.judge.best is not before

    def in_parts_of_parts(self) -> None:
        """Try the best plan with shares of large parts."""
        assert self.judge.best is not None
        cut = cut_blocks(self.problem, self.judge.best.actions)
        if cut.problem.parts:
            judge = Judge(cut.problem, self.limits, self.objective)
            judge.plan([cut.begin[number] for number in judge.decided])
            _Search(judge, self.effort, self.begins_greedily).in_parts()
            self.judge.add(play(self.problem, cut.joined(judge.best.actions if judge.best else cut.begin)))

    def moving(self, kept: Plan) -> float:
        """Seconds that a step takes at least in which what `kept` has above the limit of the device leaves, and comes back."""
        machine, device = self.problem.machine, self.limits.device
        nbytes = 0 if device is None else kept.peak - device
        if machine.link is not None:
            nbytes -= machine.in_flight  # on the host, and not in the tier
        seconds = nbytes / machine.tiers[0].write
        if len(self.problem.order) == 2:  # else other microbatches are written meanwhile
            seconds += nbytes / machine.tiers[0].read
        return seconds

    def with_fewer_recomputed(self) -> None:
        """Search over the parts of blocks beside those that the best plan recomputes (or encodes, or compresses), and beside ever
        fewer."""
        away = set(self.tiers)

        def changed(plan: Plan) -> int:
            names = (plan.actions[number].partition(":")[0] for number in self.decided)
            return sum(name != "keep" and name not in away for name in names)

        assert self.judge.best is not None
        found: dict[int, list[Plan]] = {}
        for plan in self.judge.plans.values():
            found.setdefault(changed(plan), []).append(plan)
        failed = 0
        for count in range(changed(self.judge.best), 0, -1):
            if count in found:
                better = self.in_parts_of_blocks(min(found[count], key=self.judge.score))
                failed = 0 if better else failed + 1
            if failed == 2:
                return

    # The greedy pass

    def greedy(self, kept: Plan) -> None:
        """Offload block after block, in the least time in which the plan fits into memory."""
        limits, objective = self.limits, self.objective
        within = limits.seconds
        if not objective.memory:
            within = max(objective.hidden, kept.seconds)
            within = within if limits.seconds is None else min(within, limits.seconds)
        begin = self.soonest(kept, within)
        found = self.one_pass(begin, within)
        if limits.device is None or objective.memory or within is None or found.peak <= limits.device:
            return
        times = [seconds for relaxed in RELAXED if (seconds := kept.seconds * (1 + relaxed)) > within]
        if limits.seconds is None:
            for seconds in times:
                if self.one_pass(begin, seconds).peak <= limits.device:
                    return
            return
        times = [*(seconds for seconds in times if seconds < limits.seconds), limits.seconds]
        low, high = 0, len(times) - 1
        if self.one_pass(begin, times[high]).peak > limits.device:
            return
        while low < high:
            middle = (low + high) // 2
            if self.one_pass(begin, times[middle]).peak <= limits.device:
                high = middle
            else:
                low = middle + 1

    def one_pass(self, begin: Sequence[str], seconds: float | None) -> Plan:
        """Offload what `begin` keeps to the first tier that takes anything, as far as the step takes at most `seconds`."""
        away = next((name for name in self.tiers if self.room[self.tier(name)] is None), self.tiers[0])
        chosen = [away if name == "keep" else name for name in begin]
        best = self.plan(chosen)
        if self.judge.in_time(best, seconds):
            return best
        chosen = list(begin)
        best = self.plan(chosen)
        for place, name in enumerate(begin):
            if name == "keep":
                chosen[place] = away
                tried = self.plan(chosen)
                if self.judge.in_time(tried, seconds):
                    best = tried
                else:
                    chosen[place] = "keep"
        return best

    def tier(self, action: str) -> str:
        """The name of the tier that an action uses."""
        return self.problem.choice(action).tier

    def soonest(self, kept: Plan, seconds: float | None) -> list[str]:
        """The blocks that backward needs soonest go to a tier of limited capacity (host memory), as many as it has room for.
        Microbatches that are alive at once have equal parts of it. What is needed so soon that its store is cancelled stays."""
        chosen = ["keep"] * len(self.decided)
        host = next((name for name in self.tiers if self.room[self.tier(name)] is not None), None)
        if host is None or len(self.tiers) < 2:
            return chosen
        machine = self.problem.machine
        peak = kept.peak + (0 if machine.buffers_stay else machine.buffers)
        share = (self.room[self.tier(host)] or 0) // max(1, _alive(self.problem.order))
        first = 0  # number of a chunk's first block
        for number, blocks in enumerate(self.problem.chunks):
            room = share
            for place in reversed(range(len(self.decided))):
                index = self.decided[place] - first
                if not 0 <= index < len(blocks) or blocks[index].saved > room:
                    continue
                chosen[place] = host
                tried = self.plan(chosen)
                stored = tried.timeline.blocks[number][index].stored > 0
                if stored and tried.peak <= peak and self.judge.in_time(tried, seconds):
                    peak, room = tried.peak, room - blocks[index].saved
                else:
                    chosen[place] = "keep"
            first += len(blocks)
        return chosen

    def prune(self) -> None:
        """Keep blocks of the best plan after all, the last first, whose offload writes bytes and makes nothing better. A store
        that backward cancels writes none: it is left as it is."""
        best = self.judge.best
        if best is None:
            return
        chosen = [best.actions[number] for number in self.decided]
        for place in reversed(range(len(chosen))):
            before = chosen[place]
            if before == "keep":
                continue
            chosen[place] = "keep"
            tried = self.plan(chosen)
            if written(tried) < written(best) and self.judge.score(tried) < self.judge.score(best):
                best = tried
            else:
                chosen[place] = before

    # Shares of large blocks

    def in_parts(self) -> None:
        """Try the best plan with shares of its large blocks, where it waits, or nothing limits the peak."""
        judge, limits = self.judge, self.limits
        best, kept = judge.best, judge.kept()
        if best is None:
            return
        hidden = best.seconds <= self.objective.hidden  # its transfers cost no more than they may
        if limits.device is not None and not judge.excess(best) and hidden:
            return
        all_of_it = self.objective.memory or (limits.seconds is not None and judge.excess(best) > 0)
        seconds = limits.seconds if all_of_it else max(self.objective.hidden, kept.seconds)
        apart = Judge(self.problem, limits, self.objective)
        found = LargeShares(apart, best, seconds, int(self.effort * MOVES_ONLY) // (2 * self.passes)).lowest()
        if found is None:
            return
        fits = limits.device is not None and found.peak <= limits.device
        if fits or found.peak <= best.peak - SHARES_GAIN * kept.peak:
            judge.add(found)

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
                before = self.judge.best
                self.of_shape(near, other)
                if self.judge.best is not before:
                    shape = other
        for number in range(0, most + 1, max(1, count // 12)):
            for shape in shapes:
                self.of_shape(number, shape)

    def recomputed(self) -> int:
        """Blocks, in the best plan so far."""
        return (
            0
            if self.judge.best is None
            else sum(self.judge.best.actions[n] == "recompute" for n in self.decided)
        )

    def too_slow(self, recomputed: int, most: float | None = None) -> bool:
        """Whether the computation alone of a plan that recomputes so many blocks takes longer than the best plan.

        Args:
            most: seconds that count where time is not all that does; None: no limit.
        """
        return self.over(sum(self.cheapest[:recomputed]), most)

    def over(self, recomputing: float, most: float | None) -> bool:
        """See `too_slow`, of a plan that recomputes for so many seconds in each backward."""
        best = self.judge.best
        if best is None or self.judge.excess(best) > 0:
            return False
        most = best.seconds if self.judge.by_time else most
        computing = self.judge.kept().timeline.compute_seconds
        return most is not None and computing + self.backwards * recomputing > most * (1 + 1e-9)

    def of_shape(self, recomputed: int, shape: Shape) -> None:
        """Plans with so many recomputed blocks."""
        rest, fill, layout = shape

        def make(offloaded: int) -> Plan:
            chosen = _laid_out(layout, len(self.decided), offloaded, recomputed)
            tiers = fill([i for i, name in enumerate(chosen) if name == "offload"])
            return self.plan(
                [
                    tiers.get(i, "keep") if name == "offload" else rest if name == "keep" else name
                    for i, name in enumerate(chosen)
                ]
            )

        if self.exhausted or self.too_slow(recomputed):
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
        if seconds is not None or self.limits.rate is not None:
            tests["seconds"] = lambda plan: not self.judge.in_time(plan, seconds)
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

    def improve(self, plan: Plan) -> None:
        names = list(self.problem.actions)
        best, better = plan, True
        while better and not self.exhausted:
            better = False
            for candidate in self.neighbours(best, names):
                if self.exhausted:
                    return
                again = zip(self.decided, candidate, strict=True)
                recomputing = sum(
                    self.blocks[place].recompute for place, name in again if name == "recompute"
                )
                if recomputing and self.over(recomputing, self.limits.seconds):
                    continue
                found = self.plan(candidate)
                if self.judge.score(found) < self.judge.score(best):
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


LAYOUTS = ("among recomputed", "among offloaded", "over all", "offloaded first", "offloaded after")
"""Where offloaded and recomputed blocks are. What is kept are the last ones, unless they are spread over all."""

Shape = tuple[str, Callable[[list[int]], dict[int, str]], str]
"""What happens to blocks that are neither offloaded nor recomputed, the tiers of offloaded ones, and the layout."""


def _laid_out(layout: str, count: int, offloaded: int, recomputed: int) -> list[str]:
    """One of "offload", "recompute", "keep" for each of `count` blocks."""
    away, again = ["offload"] * offloaded, ["recompute"] * recomputed
    kept = ["keep"] * (count - offloaded - recomputed)
    match layout:
        case "among recomputed":
            return _spread("offload", offloaded, again) + kept
        case "among offloaded":
            return _spread("recompute", recomputed, away) + kept
        case "over all":
            return _spread("offload", offloaded, again + kept)
        case "offloaded first":
            return away + again + kept
    return again + away + kept


def _spread(name: str, count: int, others: list[str]) -> list[str]:
    """`others` in their order, with `count` times `name` at even distances, the first at the front."""
    total = count + len(others)
    rest = iter(others)
    places = {i * total // count for i in range(count)} if count else set()
    return [name if place in places else next(rest) for place in range(total)]


def _length(blocks: Sequence[Block], *, in_parts: bool) -> int:
    """Return how many blocks, or parts of them, a pass of a simulation has."""
    return sum(len(block.parts) or 1 for block in blocks) if in_parts else len(blocks)


def _alive(order: Sequence[Pass]) -> int:
    """Return the most microbatches between their forward and their backward at once."""
    alive = most = 0
    for one in order:
        alive += 1 if one.kind == "forward" else -1
        most = max(most, alive)
    return most
