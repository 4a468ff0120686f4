"""A plan in words: what each block does and why, and what more memory or faster drives would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ssdtrain.config.units import GiB
from ssdtrain.planner.model.types import Block, StepTimeline
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, SearchProblem
from ssdtrain.planner.search import search
from ssdtrain.text import duration_text, size_text


def alternatives(
    problem: SearchProblem, limits: Limits, objective: Objective
) -> list[tuple[str, Plan | None]]:
    """The best plan if one thing were better: memory, or the bandwidth of the tiers. None: there is none."""
    cases: list[tuple[str, SearchProblem, Limits]] = []
    if limits.device is not None:
        cases.append(("1 GiB more", problem, replace(limits, device=limits.device + GiB)))
    machine = problem.machine
    if machine.tiers:
        tiers = tuple(replace(tier, write=2 * tier.write, read=2 * tier.read) for tier in machine.tiers)
        faster = replace(problem, machine=replace(machine, tiers=tiers))
        cases.append(("drives twice as fast", faster, limits))
    found: list[tuple[str, Plan | None]] = []
    for name, given, within in cases:
        try:
            found.append((name, search(given, within, objective, runners_up=0)[0]))
        except NoPlan:
            found.append((name, None))
    return found


def plan_table(
    blocks: Sequence[Block],
    plans: Sequence[Plan],
    kept: StepTimeline,
    limit: int | None,
    better: Sequence[tuple[str, Plan | None]] = (),
) -> str:
    """A plan for one rank, block by block, what is predicted, the next best plans, and what more would bring, as lines.

    Args:
        plans: best first.
        kept: the step with everything kept.
        limit: bytes of activations; None: none.
        better: of `alternatives`.
    """
    best = plans[0]
    times = [each for chunk in best.timeline.blocks for each in chunk]
    lines = ["plan auto decided, for each microbatch:"]
    numbered = zip(range(len(blocks)), best.actions, strict=True)
    for action, group in groupby(numbered, key=lambda entry: entry[1]):
        places = [number for number, _ in group]
        first, last = blocks[places[0]].name, blocks[places[-1]].name
        name = first if first == last else f"{first} .. {last} ({len(places)} blocks)"
        treated = [blocks[number] for number in places]
        size, cost = size_text(sum(block.saved + block.small for block in treated)), 0.0
        if action == "recompute":
            cost = sum(block.recompute for block in treated)
        elif action == "compress":
            smaller = [block.compressed for block in treated if block.compressed is not None]
            size += f" to {size_text(sum(block.saved for block in smaller))} (lossy)"
            cost = sum(map(_computing, smaller)) - sum(map(_computing, treated))
        else:
            cost = sum(times[number].store_stall + times[number].load_stall for number in places)
        costs = f", costs {duration_text(cost)}" if cost > 1e-9 else ""
        lines.append(f"  {name}: {action} {size}{costs}")
    bound = "" if limit is None else f" of {size_text(limit)}"
    for which, plan in zip(["predicted", *["next best"] * 3], plans, strict=False):
        ratio = plan.seconds / kept.seconds if kept.seconds else 1.0
        lines.append(
            f"  {which}: activation peak {size_text(plan.peak)}{bound}, forward and backward x{ratio:.3f} of keeping "
            f"everything ({size_text(kept.peak_bytes)})" + ("" if plan is best else f": {plan.summary()}")
        )
    for case, other in better:
        if other is None:
            lines.append(f"  with {case}: no plan")
            continue
        ratio = other.seconds / kept.seconds if kept.seconds else 1.0
        lines.append(
            f"  with {case}: activation peak {size_text(other.peak)}, x{ratio:.3f}: {other.summary()}"
        )
    return "\n".join(lines)


def _computing(block: Block) -> float:
    return block.forward + block.backward
