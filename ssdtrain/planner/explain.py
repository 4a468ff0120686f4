"""A plan in words: what each block does and why, what was predicted and measured, and what more memory or faster drives would
bring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from ssdtrain.config.units import GiB
from ssdtrain.planner.model.types import DEVICE, Block, BlockTimes, Choice, StepTimeline
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, SearchProblem
from ssdtrain.planner.search import search
from ssdtrain.text import duration_text, size_text

__all__ = ["Outcome", "alternatives", "plan_table"]


class Outcome(NamedTuple):
    """What was measured in a step under a plan."""

    peak_bytes: int
    unoffloaded_peak_bytes: int
    """What the peak would be had nothing left memory."""
    step_seconds: float
    stall_seconds: float
    """Seconds that the device stood still in a step."""
    load_waits: Mapping[str, float]
    """Seconds that backward waited on the host since the start, by module."""
    limited: bool = False
    """The config has a limit of the peak (`PeakLimit`)."""

    def warnings(self) -> Iterator[str]:
        """Lines to be logged where offloading gave nothing, or costs more than it gives."""
        whole = self.unoffloaded_peak_bytes
        saved = (whole - self.peak_bytes) / whole if whole else 0.0
        waited = self.stall_seconds / self.step_seconds if self.step_seconds else 0.0
        if self.limited and saved <= 0.01:
            return  # that much may stay, or it was said that it is too much
        if saved <= 0.01:
            yield (
                f"offload saved nothing: the activation peak is {size_text(self.peak_bytes)}, and {size_text(whole)} without "
                "it: the tiers are too slow for this model, or its forwards too short"
            )
        elif waited > saved:
            yield (
                f"offload costs more than it gives: {waited:.0%} of a step is waiting, for {saved:.0%} of the activation "
                "memory; use a smaller offload.amount, or faster drives"
            )


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
    title: str,
    problem: SearchProblem,
    plans: Sequence[Plan],
    kept: StepTimeline,
    *,
    limit: int | None = None,
    better: Sequence[tuple[str, Plan | None]] = (),
    outcome: Outcome | None = None,
) -> str:
    """A plan for one rank: a line for each run of neighbouring blocks that are treated alike, what is predicted, the next best
    plans, what more would bring, and what was measured.

    Args:
        title: what decided.
        plans: best first.
        kept: the step with everything kept.
        limit: bytes of activations; None: none.
        better: what `alternatives` returns.
        outcome: a step under the best plan; None: there was none yet.
    """
    best, lines = plans[0], [f"{title} decided, for each microbatch:"]
    names = iter(best.actions)
    for number, (blocks, times) in enumerate(zip(problem.chunks, best.timeline.blocks, strict=True)):
        rows = [_Row(problem, *row) for row in zip(blocks, names, times, strict=False)]
        for _, group in groupby(rows, key=lambda row: (row.name, row.why)):
            text = _group_text(list(group))
            # Where no module is known, the name of a region has the chunk too.
            several = f"chunk {number}: " if len(problem.chunks) > 1 else ""
            lines.append(f"  {several}{text.replace(f'chunk {number}, ', '')}")
    what, passes = "activation peak", "forward and backward"
    if best.state is not None and problem.state is not None:
        what, passes = "peak of activations and model state", "step"
        chunks = len(problem.state.chunks)
        lines.append(
            f"  model state: {best.state.persistent} of {chunks} chunks stay, {best.state.buffers} of the others are there at a "
            f"time: {size_text(best.state.limit)}"
        )
    bound = "" if limit is None else f" of {size_text(limit)}"
    for which, plan in zip(["predicted", *["next best"] * 3], plans, strict=False):
        after = f", waits {duration_text(plan.timeline.stall)}" if plan.timeline.stall > 1e-9 else ""
        after += "" if plan is best else f": {plan.summary()}"
        lines.append(
            f"  {which}: {what} {size_text(plan.peak)}{bound}, {passes} x{_ratio(plan, kept):.3f} "
            f"of keeping everything ({size_text(kept.peak_bytes)}){after}"
        )
    for case, other in better:
        bring = (
            "no plan"
            if other is None
            else f"activation peak {size_text(other.peak)}, x{_ratio(other, kept):.3f}: {other.summary()}"
        )
        lines.append(f"  with {case}: {bring}")
    if outcome is not None:
        lines.append(
            f"  measured: activation peak {size_text(outcome.peak_bytes)}, {size_text(outcome.unoffloaded_peak_bytes)} without "
            f"offload; step {duration_text(outcome.step_seconds)}, waits {duration_text(outcome.stall_seconds)}"
        )
        for name, seconds in sorted(outcome.load_waits.items(), key=lambda item: -item[1])[:3]:
            lines.append(f"  since the start backward waited {duration_text(seconds)} for {name}")
    return "\n".join(lines)


def _ratio(plan: Plan, kept: StepTimeline) -> float:
    return plan.seconds / kept.seconds if kept.seconds else 1.0


class _Row(NamedTuple):
    """A block, the name of its action, and what that costs."""

    problem: SearchProblem
    block: Block
    name: str
    times: BlockTimes

    @property
    def choice(self) -> Choice:
        return self.problem.choice(self.name)

    @property
    def why(self) -> str:
        if self.choice.tier != DEVICE:
            return ": hidden" if self.times.hidden else ": not hidden"
        return ": no time to hide its transfers, or no lower peak" if self.problem.only_moves else ""

    @property
    def cost(self) -> float:
        """Seconds."""
        block, smaller = self.block, self.block.compressed
        if self.choice.recompute:
            return block.recompute
        if self.choice.encode and block.encoded is not None:
            return block.encoded.forward + block.encoded.recompute - block.forward
        if self.choice.compress and smaller is not None:
            return smaller.forward + smaller.backward - block.forward - block.backward
        return self.times.store_stall + self.times.load_stall


def _group_text(rows: Sequence[_Row]) -> str:
    """Neighbouring blocks of one action, for one reason."""
    first, choice, several = rows[0], rows[0].choice, len(rows[0].problem.machine.tiers) > 1
    action = first.name
    if first.problem.only_moves and choice.tier != DEVICE:
        action = "offload" if choice.share == 1 else f"{choice.share:.0%} offloaded"
        if several:
            action += " to host memory" if choice.tier == "host" else " to drives"
        action += "" if choice.share == 1 else ", of"
    name = (
        first.block.name
        if len(rows) == 1
        else f"{first.block.name} .. {rows[-1].block.name} ({len(rows)} blocks)"
    )
    size = size_text(sum(row.block.saved + row.block.small for row in rows))
    if choice.compress:
        size += f" to {size_text(sum(row.block.compressed.saved for row in rows if row.block.compressed))} (lossy)"
    if choice.encode:
        size += f" to {size_text(sum(row.block.encoded.inputs for row in rows if row.block.encoded))}"
    cost = sum(row.cost for row in rows)
    costs = f", costs {duration_text(cost)}" if cost > 1e-9 else ""
    return f"{name}: {action} {size}{first.why}{costs}"
