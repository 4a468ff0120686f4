"""One plan for blocks and for the model state that comes and goes: how many chunks stay on the device, how many pass through it
at a time, and what each block does with the memory and the bandwidth that are left.

Note: [How both are searched]
For a number of chunks that stay, and of buffers beside them, all about model state is known: its bytes, the loads and stores of
each block, and the seconds of the optimizer. What is left is a problem of blocks alone, which `ssdtrain.planner.search` answers;
drives and link are shared in its simulation. The fewest and the most chunks and six numbers between are tried with two buffers
and with one, with an eighth of the effort, then those around the best one ever closer; the best one is searched in full. In
`ssdtrain.state` a further buffer takes the memory of a chunk that stays, which saves more.

Note: [What the optimizer's step takes]
With chunks stepped on the device it comes after the passes, is no part of the simulation, and is linear: seconds for what is in
no chunk, for a byte that stays, for a byte that passes. The last is measured with two buffers and with one, with which nothing
is loaded meanwhile: profiled steps take turns. What the CPU steps is a part of the simulation, with the seconds that its thread
takes for a byte: `ssdtrain.planner.model.streaming`, Note: [Steps on CPUs].

Note: [Cores that transfers take]
Where the CPU is the device, transfers take cores and memory bandwidth from computation: threads copy, compute checksums and call
drives, and a block is measured where there are fewer of them than elsewhere (the last one of a kind: no gradient is written yet).
The simulation lets both run beside each other. What the passes of profiled steps took longer than it says of these very steps
is laid on the bytes that came in them (`PassingCosts.work`): a plan with fewer transfers is charged less.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from ssdtrain.planner.derating import Bandwidths, Rates
from ssdtrain.planner.judge import Judge
from ssdtrain.planner.model.types import Block, Link, Tier
from ssdtrain.planner.parts import streamed
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, SearchProblem, kept_step, play
from ssdtrain.profile.passes import StepRecord
from ssdtrain.state.feature import ModelState
from ssdtrain.state.plan import CHUNK_BUFFERS, StateChoice, StateChunk
from ssdtrain.state.residency import StateTimes

__all__ = ["StateCosts", "StateProfile", "best_with_state", "choices_of", "same_drives"]

BETWEEN = 6
"""Numbers of chunks that stay which are tried between the fewest and the most."""

TRIES = 8
"""Steps that are simulated to find what transfers take from computation."""


@dataclass(frozen=True)
class PassingCosts:
    """What a byte of parameters costs that comes and goes, in seconds.

    Attributes:
        work: of the thread that trains each time it comes for a pass, see `Machine.state_work`.
        step: of the optimizer.
    """

    work: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class StateCosts:
    """Model state that comes and goes: what the search knows of it.

    Attributes:
        chunks: in the order of execution.
        fixed: bytes of it on the device whatever is chosen.
        tier: the drives; None: host memory.
        outside: seconds of the optimizer for what is in no chunk.
        staying: seconds of the optimizer for a byte of parameters that stays.
        passing, alone: of those that pass, with `several` buffers and with one.
        stepping: seconds of the CPU for a byte of the parameters that it steps.
        steps_inside: it does while backward runs.
        several: number of buffers that is tried beside one.
    """

    chunks: Sequence[StateChunk]
    fixed: int
    tier: Tier | None = None
    outside: float = 0.0
    staying: float = 0.0
    passing: PassingCosts = PassingCosts()
    alone: PassingCosts = PassingCosts()
    stepping: float = 0.0
    steps_inside: bool = False
    several: float = CHUNK_BUFFERS

    def choice(self, persistent: int, buffers: float) -> StateChoice:
        """Return the choice of so many chunks that stay, with its limit."""
        staying, moving = self.chunks[:persistent], self.chunks[persistent:]
        rest = [chunk.passing - chunk.staying for chunk in staying] + [chunk.passing for chunk in moving]
        nbytes = self.fixed + sum(chunk.staying for chunk in staying) + int(buffers * max(rest, default=0))
        return StateChoice(persistent, buffers, nbytes)

    def seconds(self, choice: StateChoice) -> float:
        """Return the seconds of the optimizer under `choice`."""
        staying = sum(chunk.values for chunk in self.chunks[: choice.persistent])
        moving = sum(chunk.values for chunk in self.chunks[choice.persistent :])
        return self.outside + self.staying * staying + self._passing(choice).step * moving

    def _passing(self, choice: StateChoice) -> PassingCosts:
        return self.alone if choice.buffers == 1 else self.passing

    def applied(self, problem: SearchProblem, choice: StateChoice) -> SearchProblem:
        """Return the problem of blocks that is left of `problem` under `choice`."""
        again = sum(one.kind == "backward" for one in problem.order) > 1
        staying, moving = self.chunks[: choice.persistent], self.chunks[choice.persistent :]
        passing = {chunk.name for chunk in moving}
        chunks = {chunk.name: chunk for chunk in self.chunks}
        link = problem.machine.link is not None

        done: set[str] = set()

        def of(block: Block) -> Block:
            chunk = chunks.get(block.name)
            if chunk is None or not (block.name in passing or chunk.stepped):
                return block
            moved: dict[str, Any] = {"backward_loads": 0}
            if block.name in passing:
                moved["forward_loads"] = chunk.values
                moved["backward_loads"] = chunk.values + (chunk.gradients if again else 0)
            elif link and again:
                moved["backward_loads"] = chunk.gradients
            # Of a block that runs several times in a forward, the first time comes last in backward.
            if block.name not in done:
                done.add(block.name)
                moved["cpu_step"] = self.stepping * chunk.stepped
                if block.name in passing:
                    moved["backward_stores"] = chunk.gradients
                elif link:
                    moved |= {"backward_stores": chunk.gradients, "returns": chunk.stepped}
            others = {name: getattr(block, name) for name in ("compressed", "encoded")}
            others = {name: other and streamed(other, **moved) for name, other in others.items()}
            return replace(streamed(block, **moved), **others)

        there = self.fixed + sum(chunk.staying for chunk in staying)
        machine = replace(
            problem.machine,
            state=self.tier,
            state_buffers=math.ceil(choice.buffers),
            state_room=max(0, choice.limit - there - max((chunk.gradients for chunk in moving), default=0)),
            state_work=self._passing(choice).work,
            steps_inside=self.steps_inside,
        )
        return replace(
            problem,
            chunks=[[of(block) for block in blocks] for blocks in problem.chunks],
            machine=machine,
            beside=problem.beside + choice.limit,
            after=problem.after + self.seconds(choice),
            chosen=choice,
        )


def choices_of(costs: StateCosts) -> list[StateChoice]:
    """List all choices."""
    count = len(costs.chunks)
    return [costs.choice(number, buffers) for number in range(count + 1) for buffers in (costs.several, 1)]


def best_with_state(
    problem: SearchProblem,
    search: Callable[[SearchProblem, float], Sequence[Plan]],
    limits: Limits,
    objective: Objective,
) -> list[Plan]:
    """Find the best plans over blocks and state: see Note: [How both are searched].

    Args:
        search: finds the best plans of a problem of blocks with a part of the effort; raises NoPlan.

    Raises:
        NoPlan: none keeps to the limits.
    """
    costs = problem.state
    assert costs is not None
    judge, count = Judge(problem, limits, objective), len(costs.chunks)
    if limits.device is None:
        return list(search(costs.applied(problem, costs.choice(0, CHUNK_BUFFERS)), 1.0))
    found: dict[StateChoice, list[Plan]] = {}
    failures: list[NoPlan] = []
    effort = 1.0 / (2 + BETWEEN)

    def try_number(number: int) -> None:
        assert limits.device is not None
        for buffers in (costs.several, 1):
            choice = costs.choice(number, buffers)
            if choice in found:
                continue
            found[choice] = []
            if number and choice.limit > limits.device:
                continue
            left, best = costs.applied(problem, choice), plans()
            if best and judge.by_time and kept_step(left).seconds >= best[0].seconds:
                continue  # nothing is faster than keeping what is saved
            try:
                found[choice] = list(search(left, effort))
            except NoPlan as error:
                failures.append(error)

    def plans() -> list[Plan]:
        return sorted((plan for several in found.values() for plan in several), key=judge.score)

    step = max(1, -(-count // (1 + BETWEEN)))
    for number in sorted({*range(0, count + 1, step), count}):
        try_number(number)
    while step > 1 and (best := plans()):
        step = (step + 1) // 2
        near = best[0].state.persistent if best[0].state is not None else 0
        for number in (near - step, near + step):
            if 0 <= number <= count:
                try_number(number)
    if best := plans():
        choice = best[0].state
        assert choice is not None
        found[choice] = list(search(costs.applied(problem, choice), 1.0))
        return plans()
    nearest = failures[0]
    for error in failures[1:]:
        nearest = error if error.nearer_than(nearest) else nearest
    raise nearest


class StateProfile:
    """Measures what model state costs, from step to step.

    Args:
        state: of the model.
        name: of the tier of its drives in the cost model: that of activations, where these are the same.
        link: bytes per second between device and host, each way; None: a CPU.
    """

    def __init__(self, state: ModelState, name: str, link: Link | None) -> None:
        self._state, self._name, self._link = state, name, link
        self._bandwidths, self._before = Bandwidths(), StateTimes()
        self._alone, self._several = (
            False,
            float(CHUNK_BUFFERS),
        )  # this step runs with one buffer; else with so many
        self._times: dict[bool, list[StateTimes]] = {False: [], True: []}  # of steps with one, and with more
        self._passes: dict[bool, list[float]] = {False: [], True: []}  # seconds of a pass of these
        self._rates: list[Rates] = []

    @property
    def limit(self) -> int:
        """Bytes on the device at most, now."""
        return self._state.limit

    def begin(self) -> None:
        """Forget what was measured: steps run otherwise from now on."""
        for alone in (False, True):
            self._times[alone].clear()
            self._passes[alone].clear()
        self._rates.clear()
        self._take_turns(alone=False)
        self._measure()

    @property
    def kinds(self) -> int:
        """Number of kinds of steps that a plan needs enough of: on a CPU, where times vary most, those with one buffer and the
        others are told apart."""
        return 2 if self._link is None and self._state.planned_chunks() else 1

    def step_ended(self, number: int, record: StepRecord | None) -> None:
        """Measure the step of this number, from 1. The time of its passes counts if it was recorded; that of an optimizer which
        has its state does in any case.

        Args:
            record: of its passes; None: it was not recorded.
        """
        times, rates = self._measure()
        if record is not None or number > 1:
            self._times[self._alone].append(times)
        if record is not None:
            self._rates.append(rates)
            if self._link is None:
                seconds = [one.ended - one.began for one in record.passes()]
                self._passes[self._alone].append(statistics.fmean(seconds or [0.0]))
        self._take_turns(alone=not self._alone)

    def _take_turns(self, *, alone: bool) -> None:
        chunks = self._state.planned_chunks()
        self._alone = alone and bool(chunks)
        costs = StateCosts(chunks, self._state.fixed)
        self._several = self._several_of(costs)
        limit = costs.choice(0, 1 if self._alone else self._several).limit
        narrows = self._alone or (self._several < CHUNK_BUFFERS and limit < self._state.limit)
        self._state.narrow(limit if narrows else None)

    def _several_of(self, costs: StateCosts) -> float:
        """Return `StateCosts.several`: where two do not fit, on a CPU, the parameters and gradients of the next chunk may."""
        small = self._link is None and self._state.limit < costs.choice(0, CHUNK_BUFFERS).limit
        return 1.5 if small else CHUNK_BUFFERS

    def _measure(self) -> tuple[StateTimes, Rates]:
        now = self._state.times()
        times, self._before = now.since(self._before), now
        return times, self._bandwidths.since(self._state.tiers())

    def costs(self) -> StateCosts | None:
        """Return what the search is to know; None: no chunk comes and goes."""
        chunks, several = self._state.planned_chunks(), self._times[False]
        if not chunks or not several:
            return None
        times, alone = _medians(several), _medians(self._times[True] or several)
        values = sum(chunk.values for chunk in chunks) or 1
        read, write = (_median(rates) for rates in zip(*self._rates, strict=True))
        tier = None if read is None else Tier(self._name, write or read, read)

        def of(times: StateTimes) -> PassingCosts:
            work = times.hooks / times.hook_bytes if times.hook_bytes and self._link is None else 0.0
            return PassingCosts(work, times.chunks / values)

        return StateCosts(
            chunks,
            self._state.fixed,
            tier,
            times.outside,
            times.computing / values,
            of(times),
            of(alone),
            times.stepping / times.stepped_bytes if times.stepped_bytes else 0.0,
            self._state.steps_inside,
            self._several,
        )

    def slowed(self, problem: SearchProblem, actions: Sequence[str]) -> StateCosts | None:
        """Return the costs of `problem` with what transfers took from computation: see Note: [Cores that transfers take].

        Args:
            actions: of the steps that were measured.
        """
        costs = problem.state
        if costs is None or self._link is not None:
            return costs

        def work_of(known: PassingCosts, buffers: float, seconds: Sequence[float]) -> float:
            left = replace(costs.applied(problem, costs.choice(0, buffers)), after=0.0)
            passes = Counter(one.kind for one in left.order)
            came = sum(
                passes["forward"] * block.forward_loads + passes["backward"] * block.backward_loads
                for block in left.blocks
            )
            measured = statistics.median(seconds) * len(left.order) if seconds else 0.0
            work = known.work
            for _ in range(TRIES if measured and came else 0):  # what is added hides a part of the transfers
                left = replace(left, machine=replace(left.machine, state_work=work))
                work = max(0.0, work + (measured - play(left, actions).seconds) / came)
            return work

        # One for both: times vary more than a byte's share of the cores differs between them.
        several, alone = self._passes[False], self._passes[True]
        work = statistics.fmean(
            (
                work_of(costs.passing, costs.several, several or alone),
                work_of(costs.alone, 1, alone or several),
            )
        )
        return replace(
            costs, passing=replace(costs.passing, work=work), alone=replace(costs.alone, work=work)
        )

    def follow(self, choice: StateChoice) -> None:
        """Carry out a choice from the next forward on."""
        self._state.follow(choice)


def _medians(times: Sequence[StateTimes]) -> StateTimes:
    return StateTimes(*map(statistics.median, zip(*map(astuple, times), strict=True)))


def _median(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate]
    return statistics.median(known) if known else None


def same_drives(directories: Sequence[Path], others: Sequence[Path]) -> bool:
    """Return whether a file system is among both; they exist."""
    return not {os.stat(one).st_dev for one in directories}.isdisjoint(os.stat(one).st_dev for one in others)
