"""Which blocks to offload, by the cost model: as many as transfers can be hidden for, at the lowest peak.

Few blocks are all tried (`ssdtrain.planner.search`). Of many, which is the rule, each is small: there the choice by one pass
over them is as good, and takes a tenth of a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, Problem
from ssdtrain.planner.search import search
from ssdtrain.planner.shares import coarse_blocks, with_shares
from ssdtrain.planner.step import KEEP, Block, Choice, Machine, Pass, StepTimeline
from ssdtrain.planner.timeline import simulate
from ssdtrain.planner.untraced import untraced

__all__ = ["Chosen", "as_plan", "choose_offloads", "no_plan"]

SLACK = 0.01
"""Of the time of a step that keeps everything: what transfers may cost."""

RELAXED = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)
"""The slacks that are tried in turn where a budget of device memory asks for more than can be hidden."""


BLOCK_PASSES = 60_000
"""Of all choices together, where they are all tried: some tenths of a second."""

SHARES_GAIN = 0.02
"""Of the peak where everything is kept: offloading parts of blocks has to lower it by so much."""


@dataclass(frozen=True)
class Chosen:
    """A choice for each block, what the cost model says of it, and of keeping everything."""

    choices: tuple[tuple[Choice, ...], ...]
    predicted: StepTimeline
    kept: StepTimeline

    def beside(self, other: int) -> Chosen:
        """With `other` bytes more in the peak."""
        return replace(self, predicted=replace(self.predicted, peak_bytes=self.predicted.peak_bytes + other))


@dataclass(frozen=True)
class _Task:
    """What is chosen for.

    Attributes:
        kept: the step that keeps everything.
        slack, budget: `slack` and `device_budget` of `choose_offloads`.
        rate: bytes per second that the first tier is written at most.
    """

    chunks: Sequence[Sequence[Block]]
    order: Sequence[Pass]
    machine: Machine
    kept: StepTimeline
    slack: float
    budget: int | None
    rate: float

    @property
    def seconds(self) -> float:
        """That a step may take."""
        return self.kept.seconds * (1 + self.slack)

    def play(self, choices: Sequence[Sequence[Choice]]) -> StepTimeline:
        return simulate(self.chunks, choices, self.order, self.machine, steps=2)

    def allows(self, step: StepTimeline) -> bool:
        """It takes no longer than it may, and the bytes written to the first tier are at most what `rate` allows in its time.
        Otherwise each step would begin with a longer queue of writes, or the drive would wear faster than its budget."""
        written = next(iter(step.written.values()))
        return step.seconds <= self.seconds and written <= self.rate * step.seconds


def as_plan(
    chunks: Sequence[Sequence[Block]], order: Sequence[Pass], machine: Machine, found: Chosen
) -> tuple[Problem, Plan]:
    """What was chosen as a plan, and the problem that it is of."""
    several = len(machine.tiers) > 1
    names = {KEEP: "keep"}
    flat = [choice for choices in found.choices for choice in choices]
    for choice in flat:
        if choice not in names:
            name = "offload" if choice.share == 1 else f"offload {choice.share:.0%}"
            name += f" to {choice.tier}" if several else ""
            names[choice] = f"{name} ({len(names)})" if name in names.values() else name
    actions = {name: choice for choice, name in names.items()}
    plan = Plan(tuple(names[choice] for choice in flat), found.predicted)
    return Problem(chunks, order, machine, actions), plan


def no_plan(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    nearest: Chosen,
    limits: Limits,
) -> NoPlan:
    """That no choice keeps to the limits, and this one is nearest."""
    problem, plan = as_plan(chunks, order, machine, nearest)
    return NoPlan(plan, limits, problem.blocks)


@untraced
def choose_offloads(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    *,
    slack: float = SLACK,
    device_budget: int | None = None,
    endurance: float | None = None,
) -> Chosen:
    """Offload blocks to the machine's first tier, and what backward needs soonest to a second one, which has a capacity.

    Blocks are offloaded whole, and in part where they are large and that lowers the peak within the same time
    (`ssdtrain.planner.shares`). Under a budget parts are tried where whole blocks reach it only by waiting.

    On a CPU everything stays where the hooks of one store and one load take more than `slack`, whatever the drive: in a model
    whose step takes milliseconds they do. Times should be those of several steps (`ssdtrain.planner.recent`).

    Args:
        slack: what transfers may cost, of the time of keeping everything.
        device_budget: bytes that the peak should stay under, at the least slack that allows it; what is not
            needed for it stays.
        endurance: bytes per second that the tier should be written at most, of the time of the step; None: as fast as it can.
    """
    kept = simulate(chunks, [[KEEP] * len(blocks) for blocks in chunks], order, machine, steps=2)
    rate = machine.tiers[0].write if endurance is None else min(endurance, machine.tiers[0].write)
    found = _choose(_Task(chunks, order, machine, kept, slack, device_budget, rate))
    if found.predicted.peak_bytes < kept.peak_bytes:
        return found
    # What comes back takes more than leaves.
    return Chosen(tuple((KEEP,) * len(blocks) for blocks in chunks), kept, kept)


def _choose(task: _Task) -> Chosen:
    found = _choose_whole(task)
    if task.machine.copies is None or not coarse_blocks(task.chunks):
        return found
    if task.budget is None:
        return _in_parts(task, found)
    hidden = found.predicted.seconds <= task.seconds
    if hidden and found.predicted.peak_bytes <= task.budget:
        return found
    free = replace(task, budget=None)
    parts = _in_parts(free, _choose_whole(free))
    return parts if parts.predicted.peak_bytes <= task.budget else found


def _choose_whole(task: _Task) -> Chosen:
    """Few blocks are tried in every combination. Of many, each is tried in forward order, since what is saved first has the most
    time: it is offloaded if the step then takes at most 1 + `slack` of keeping everything. So where a tier is slower than the
    model saves, the offloaded blocks spread over forward at the pace of the tier. After that those stay
    after all, the last first, whose offload writes bytes and does not lower the peak. A store that backward cancels writes none:
    it is left as it is.
    """
    if _few(task) and len(task.machine.tiers) == 1:
        tried = _tried(task)
        if tried is not None:
            return tried
    begin = _soonest(task)
    found = _within(task, begin)
    if task.budget is not None:
        for relaxed in RELAXED:
            if found.predicted.peak_bytes <= task.budget:
                break
            if relaxed > task.slack:
                found = _within(replace(task, slack=relaxed), begin)
    return _pruned(task, found)


def _in_parts(task: _Task, found: Chosen) -> Chosen:
    """`found`, or what is better by parts of its large blocks."""

    def play(choices: Sequence[Sequence[Choice]]) -> StepTimeline | None:
        tried = task.play(choices)
        return tried if task.allows(tried) else None

    away, most = Choice(task.machine.tiers[0].name), BLOCK_PASSES // max(1, 2 * _block_passes(task))
    better = with_shares(found.choices, coarse_blocks(task.chunks), away, play, most)
    gain = SHARES_GAIN * task.kept.peak_bytes
    if better is None or better[1].peak_bytes > found.predicted.peak_bytes - gain:
        return found
    return Chosen(_fixed(better[0]), better[1], task.kept)


def _block_passes(task: _Task) -> int:
    """That the cost model plays in two steps."""
    return 2 * sum(len(task.chunks[one.chunk]) for one in task.order if one.kind != "idle")


def _few(task: _Task) -> bool:
    movable = sum(block.saved > 0 for blocks in task.chunks for block in blocks)
    return movable <= 16 and 2**movable * _block_passes(task) <= BLOCK_PASSES


def _tried(task: _Task) -> Chosen | None:
    """The best of all choices; None: none is within the budget."""
    actions = {"keep": KEEP, "offload": Choice(task.machine.tiers[0].name)}
    problem = Problem(task.chunks, task.order, task.machine, actions, steps=2)
    written = task.rate * task.kept.seconds
    if task.budget is None:
        limits, objective = Limits(seconds=task.seconds, written=written), Objective(0, 1)
    else:
        limits, objective = Limits(device=task.budget, written=written), Objective()
    try:
        [best, *_] = search(problem, limits, objective, exact=1 << 16)
    except NoPlan:
        return None
    flat = iter(best.actions)
    choices = tuple(tuple(actions[next(flat)] for _ in blocks) for blocks in task.chunks)
    return Chosen(choices, best.timeline, task.kept)


def _soonest(task: _Task) -> list[list[Choice]]:
    """Blocks for a second tier, host memory: those that backward needs soonest, as many as it has room for. Microbatches that
    are alive at once have equal parts of it. What is needed so soon that its store is cancelled stays."""
    machine = task.machine
    choices = [[KEEP] * len(blocks) for blocks in task.chunks]
    if len(machine.tiers) == 1:
        return choices
    host = Choice(machine.tiers[1].name)
    peak = task.kept.peak_bytes + (0 if machine.buffers_stay else machine.buffers)
    share = (machine.tiers[1].capacity or 0) // _most_alive(task.order)
    for number, blocks in enumerate(task.chunks):
        room = share
        for index in reversed(range(len(blocks))):
            if not 0 < blocks[index].saved <= room:
                continue
            choices[number][index] = host
            tried = task.play(choices)
            stored = tried.blocks[number][index].stored > 0
            if stored and tried.peak_bytes <= peak and tried.seconds <= task.seconds:
                peak, room = tried.peak_bytes, room - blocks[index].saved
            else:
                choices[number][index] = KEEP
    return choices


def _within(task: _Task, begin: Sequence[Sequence[Choice]]) -> Chosen:
    """Blocks for the first tier, beside what `begin` has in the second."""
    away = Choice(task.machine.tiers[0].name)
    choices = [list(chosen) for chosen in begin]
    everything = [
        [
            away if block.saved and choice == KEEP else choice
            for block, choice in zip(blocks, chosen, strict=True)
        ]
        for blocks, chosen in zip(task.chunks, begin, strict=True)
    ]
    best = task.play(everything)
    if task.allows(best):
        return Chosen(_fixed(everything), best, task.kept)
    best = task.play(choices)
    for number, blocks in enumerate(task.chunks):
        for index, block in enumerate(blocks):
            if not block.saved or choices[number][index] != KEEP:
                continue
            choices[number][index] = away
            tried = task.play(choices)
            if task.allows(tried):
                best = tried
            else:
                choices[number][index] = KEEP
    return Chosen(_fixed(choices), best, task.kept)


def _most_alive(order: Sequence[Pass]) -> int:
    """Microbatches between forward and backward at once."""
    alive = most = 0
    for one in order:
        if one.kind != "idle":
            alive += 1 if one.kind == "forward" else -1
            most = max(most, alive)
    return max(1, most)


def _pruned(task: _Task, found: Chosen) -> Chosen:
    choices, best = [list(chosen) for chosen in found.choices], found.predicted
    limit = found.predicted.peak_bytes if task.budget is None else task.budget
    for number in reversed(range(len(choices))):
        for index in reversed(range(len(choices[number]))):
            before = choices[number][index]
            if before == KEEP:
                continue
            choices[number][index] = KEEP
            tried = task.play(choices)
            # Of a store that backward cancels nothing is saved by keeping its block.
            less = sum(tried.written.values()) < sum(best.written.values())
            if less and tried.peak_bytes <= limit and tried.seconds <= best.seconds * (1 + 1e-9):
                best = tried
            else:
                choices[number][index] = before
    return Chosen(_fixed(choices), best, found.kept)


def _fixed(choices: Sequence[Sequence[Choice]]) -> tuple[tuple[Choice, ...], ...]:
    return tuple(tuple(chosen) for chosen in choices)
