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
    found = _choose(chunks, order, machine, kept, slack, device_budget, rate)
    if found.predicted.peak_bytes < kept.peak_bytes:
        return found
    # What comes back takes more than leaves.
    return Chosen(tuple((KEEP,) * len(blocks) for blocks in chunks), kept, kept)


def _choose(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    kept: StepTimeline,
    slack: float,
    device_budget: int | None,
    rate: float,
) -> Chosen:
    found = _choose_whole(chunks, order, machine, kept, slack, device_budget, rate)
    if machine.copies is None or not coarse_blocks(chunks):
        return found
    if device_budget is None:
        return _in_parts(chunks, order, machine, found, slack, rate)
    hidden = found.predicted.seconds <= kept.seconds * (1 + slack)
    if hidden and found.predicted.peak_bytes <= device_budget:
        return found
    free = _choose_whole(chunks, order, machine, kept, slack, None, rate)
    free = _in_parts(chunks, order, machine, free, slack, rate)
    return free if free.predicted.peak_bytes <= device_budget else found


def _choose_whole(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    kept: StepTimeline,
    slack: float,
    device_budget: int | None,
    rate: float,
) -> Chosen:
    """Few blocks are tried in every combination. Of many, each is tried in forward order, since what is saved first has the most
    time: it is offloaded if the step then takes at most 1 + `slack` of keeping everything. So where a tier is slower than the
    model saves, the offloaded blocks spread over forward at the pace of the tier. After that those stay
    after all, the last first, whose offload writes bytes and does not lower the peak. A store that backward cancels writes none:
    it is left as it is.
    """
    if _few(chunks, order) and len(machine.tiers) == 1:
        tried = _tried(chunks, order, machine, kept, slack, device_budget, rate)
        if tried is not None:
            return tried
    begin = _soonest(chunks, order, machine, kept, slack)
    found = _within(chunks, order, machine, begin, kept, slack, rate)
    if device_budget is not None:
        for relaxed in RELAXED:
            if found.predicted.peak_bytes <= device_budget:
                break
            if relaxed > slack:
                found = _within(chunks, order, machine, begin, kept, relaxed, rate)
    return _pruned(chunks, order, machine, found, device_budget)


def _in_parts(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    found: Chosen,
    slack: float,
    rate: float,
) -> Chosen:
    """`found`, or what is better by parts of its large blocks."""

    def play(choices: Sequence[Sequence[Choice]]) -> StepTimeline | None:
        tried = simulate(chunks, choices, order, machine, steps=2)
        return tried if tried.seconds <= limit and _sustained(tried, rate) else None

    limit = found.kept.seconds * (1 + slack)
    away, most = Choice(machine.tiers[0].name), BLOCK_PASSES // max(1, 2 * _block_passes(chunks, order))
    better = with_shares(found.choices, coarse_blocks(chunks), away, play, most)
    gain = SHARES_GAIN * found.kept.peak_bytes
    if better is None or better[1].peak_bytes > found.predicted.peak_bytes - gain:
        return found
    return Chosen(_fixed(better[0]), better[1], found.kept)


def _block_passes(chunks: Sequence[Sequence[Block]], order: Sequence[Pass]) -> int:
    """That the cost model plays in two steps."""
    return 2 * sum(len(chunks[one.chunk]) for one in order if one.kind != "idle")


def _few(chunks: Sequence[Sequence[Block]], order: Sequence[Pass]) -> bool:
    movable = sum(block.saved > 0 for blocks in chunks for block in blocks)
    return movable <= 16 and 2**movable * _block_passes(chunks, order) <= BLOCK_PASSES


def _tried(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    kept: StepTimeline,
    slack: float,
    device_budget: int | None,
    rate: float,
) -> Chosen | None:
    """The best of all choices; None: none is within the budget."""
    actions = {"keep": KEEP, "offload": Choice(machine.tiers[0].name)}
    problem = Problem(chunks, order, machine, actions, steps=2)
    if device_budget is None:
        limits = Limits(seconds=kept.seconds * (1 + slack), written=rate * kept.seconds)
        objective = Objective(0, 1)
    else:
        limits, objective = Limits(device=device_budget, written=rate * kept.seconds), Objective()
    try:
        [best, *_] = search(problem, limits, objective, exact=1 << 16)
    except NoPlan:
        return None
    flat = iter(best.actions)
    choices = tuple(tuple(actions[next(flat)] for _ in blocks) for blocks in chunks)
    return Chosen(choices, best.timeline, kept)


def _soonest(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    kept: StepTimeline,
    slack: float,
) -> list[list[Choice]]:
    """Blocks for a second tier, host memory: those that backward needs soonest, as many as it has room for. Microbatches that
    are alive at once have equal parts of it. What is needed so soon that its store is cancelled stays."""
    choices = [[KEEP] * len(blocks) for blocks in chunks]
    if len(machine.tiers) == 1:
        return choices
    host = Choice(machine.tiers[1].name)
    peak = kept.peak_bytes + (0 if machine.buffers_stay else machine.buffers)
    share = (machine.tiers[1].capacity or 0) // _most_alive(order)
    for number, blocks in enumerate(chunks):
        room = share
        for index in reversed(range(len(blocks))):
            if not 0 < blocks[index].saved <= room:
                continue
            choices[number][index] = host
            tried = simulate(chunks, choices, order, machine, steps=2)
            stored = tried.blocks[number][index].stored > 0
            if stored and tried.peak_bytes <= peak and tried.seconds <= kept.seconds * (1 + slack):
                peak, room = tried.peak_bytes, room - blocks[index].saved
            else:
                choices[number][index] = KEEP
    return choices


def _within(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    begin: Sequence[Sequence[Choice]],
    kept: StepTimeline,
    slack: float,
    rate: float,
) -> Chosen:
    """Blocks for the first tier, beside what `begin` has in the second."""
    away = Choice(machine.tiers[0].name)
    limit = kept.seconds * (1 + slack)
    choices = [list(chosen) for chosen in begin]
    everything = [
        [
            away if block.saved and choice == KEEP else choice
            for block, choice in zip(blocks, chosen, strict=True)
        ]
        for blocks, chosen in zip(chunks, begin, strict=True)
    ]
    best = simulate(chunks, everything, order, machine, steps=2)
    if best.seconds <= limit and _sustained(best, rate):
        return Chosen(_fixed(everything), best, kept)
    best = simulate(chunks, choices, order, machine, steps=2)
    for number, blocks in enumerate(chunks):
        for index, block in enumerate(blocks):
            if not block.saved or choices[number][index] != KEEP:
                continue
            choices[number][index] = away
            tried = simulate(chunks, choices, order, machine, steps=2)
            if tried.seconds <= limit and _sustained(tried, rate):
                best = tried
            else:
                choices[number][index] = KEEP
    return Chosen(_fixed(choices), best, kept)


def _most_alive(order: Sequence[Pass]) -> int:
    """Microbatches between forward and backward at once."""
    alive = most = 0
    for one in order:
        if one.kind != "idle":
            alive += 1 if one.kind == "forward" else -1
            most = max(most, alive)
    return max(1, most)


def _sustained(step: StepTimeline, rate: float) -> bool:
    """The bytes written to the first tier in a step are at most what `rate` allows in its time. Otherwise each step would begin
    with a longer queue of writes, or the drive would wear faster than its budget."""
    return next(iter(step.written.values())) <= rate * step.seconds


def _pruned(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    found: Chosen,
    device_budget: int | None,
) -> Chosen:
    choices, best = [list(chosen) for chosen in found.choices], found.predicted
    for number in reversed(range(len(chunks))):
        for index in reversed(range(len(chunks[number]))):
            before = choices[number][index]
            if before == KEEP:
                continue
            choices[number][index] = KEEP
            tried = simulate(chunks, choices, order, machine, steps=2)
            limit = found.predicted.peak_bytes if device_budget is None else device_budget
            # Of a store that backward cancels nothing is saved by keeping its block.
            less = sum(tried.written.values()) < sum(best.written.values())
            if less and tried.peak_bytes <= limit and tried.seconds <= best.seconds * (1 + 1e-9):
                best = tried
            else:
                choices[number][index] = before
    return Chosen(_fixed(choices), best, found.kept)


def _fixed(choices: Sequence[Sequence[Choice]]) -> tuple[tuple[Choice, ...], ...]:
    return tuple(tuple(chosen) for chosen in choices)
