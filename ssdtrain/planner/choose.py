"""Which blocks to offload, by the cost model: as many as transfers can be hidden for, at the lowest peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.planner.step import KEEP, Block, Choice, Machine, Pass, StepTimeline
from ssdtrain.planner.timeline import simulate

__all__ = ["Chosen", "choose_offloads"]

SLACK = 0.01
"""Of the time of a step that keeps everything: what transfers may cost."""

RELAXED = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)
"""The slacks that are tried in turn where a budget of device memory asks for more than can be hidden."""


@dataclass(frozen=True)
class Chosen:
    """A choice for each block, what the cost model says of it, and of keeping everything."""

    choices: tuple[tuple[Choice, ...], ...]
    predicted: StepTimeline
    kept: StepTimeline


def choose_offloads(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    *,
    slack: float = SLACK,
    device_budget: int | None = None,
) -> Chosen:
    """Offload blocks to the machine's first tier.

    Blocks are tried in forward order, since what is saved first has the most time: each is offloaded if the
    step then takes at most 1 + `slack` of keeping everything. So where a tier is slower than the model saves,
    the offloaded blocks spread over forward at the pace of the tier. After that those whose offload does not
    lower the peak stay after all, the last first.

    Args:
        device_budget: bytes that the peak should stay under, at the least slack that allows it; what is not
        needed for it stays.
    """
    kept = simulate(chunks, [[KEEP] * len(blocks) for blocks in chunks], order, machine, steps=2)
    found = _within(chunks, order, machine, kept, slack)
    if device_budget is not None:
        for relaxed in RELAXED:
            if found.predicted.peak_bytes <= device_budget:
                break
            if relaxed > slack:
                found = _within(chunks, order, machine, kept, relaxed)
    return _pruned(chunks, order, machine, found, device_budget)


def _within(
    chunks: Sequence[Sequence[Block]],
    order: Sequence[Pass],
    machine: Machine,
    kept: StepTimeline,
    slack: float,
) -> Chosen:
    away = Choice(machine.tiers[0].name)
    limit = kept.seconds * (1 + slack)
    everything = [[away if block.saved else KEEP for block in blocks] for blocks in chunks]
    best = simulate(chunks, everything, order, machine, steps=2)
    if best.seconds <= limit and _sustained(best, machine):
        return Chosen(_fixed(everything), best, kept)
    best, choices = kept, [[KEEP] * len(blocks) for blocks in chunks]
    for number, blocks in enumerate(chunks):
        for index, block in enumerate(blocks):
            if not block.saved:
                continue
            choices[number][index] = away
            tried = simulate(chunks, choices, order, machine, steps=2)
            if tried.seconds <= limit and _sustained(tried, machine):
                best = tried
            else:
                choices[number][index] = KEEP
    return Chosen(_fixed(choices), best, kept)


def _sustained(step: StepTimeline, machine: Machine) -> bool:
    """The tier can write in the time of a step what it is given in one: else each step would begin with more to be written."""
    stored = sum(times.stored for chunk in step.blocks for times in chunk)
    return stored / machine.tiers[0].write <= step.seconds


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
            if tried.peak_bytes <= limit and tried.seconds <= best.seconds * (1 + 1e-9):
                best = tried
            else:
                choices[number][index] = before
    return Chosen(_fixed(choices), best, found.kept)


def _fixed(choices: Sequence[Sequence[Choice]]) -> tuple[tuple[Choice, ...], ...]:
    return tuple(tuple(chosen) for chosen in choices)
