"""The log table of a plan: its actions, and predicted and measured figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ssdtrain.planner.model.types import KEPT, Block, BlockTimes, Choice, StepTimeline
from ssdtrain.planner.plans import Plan, SearchProblem
from ssdtrain.text import duration_text, size_text

__all__ = ["Outcome", "decision_table"]


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


class _Row(NamedTuple):
    block: Block
    choice: Choice
    times: BlockTimes

    @property
    def why(self) -> str:
        if self.choice == KEPT:
            return "no time to hide its transfers, or no lower peak"
        return "hidden" if self.times.hidden else "not hidden"


def decision_table(
    chunks: Sequence[int], problem: SearchProblem, plan: Plan, kept: StepTimeline, outcome: Outcome
) -> str:
    """A line for each run of neighbouring blocks of one action, then what was predicted and measured.

    Args:
        chunks: the numbers of the model chunks that `problem` has.
        kept: the step that keeps everything.
    """
    lines = ["offload.amount auto decided, for each microbatch:"]
    predicted = plan.timeline
    every = zip(chunks, problem.chunks, problem.choices(plan.actions), predicted.blocks, strict=True)
    for chunk, *parts in every:
        rows = [_Row(*row) for row in zip(*parts, strict=True)]
        for (choice, why), group in groupby(rows, key=lambda row: (row.choice, row.why)):
            action = _action_text(choice, several=len(predicted.written) > 1)
            text = _group_text(list(group), action, why)
            # Where no module is known, the name of a region has the chunk too.
            lines.append(f"  chunk {chunk}: {text.replace(f'chunk {chunk}, ', '')}")
    lines.append(
        f"  activation peak: {size_text(predicted.peak_bytes)} predicted, {size_text(outcome.peak_bytes)} measured, "
        f"{size_text(outcome.unoffloaded_peak_bytes)} without offload"
    )
    ratio = predicted.seconds / kept.seconds
    lines.append(
        f"  forward and backward: x{ratio:.3f} of keeping everything predicted, of which waits {duration_text(predicted.stall)};"
        f" step {duration_text(outcome.step_seconds)}, waits {duration_text(outcome.stall_seconds)} measured"
    )
    for name, seconds in sorted(outcome.load_waits.items(), key=lambda item: -item[1])[:3]:
        lines.append(f"  since the start backward waited {duration_text(seconds)} for {name}")
    return "\n".join(lines)


def _action_text(choice: Choice, *, several: bool) -> str:
    """Name the action, with the tier where there are `several`."""
    if choice == KEPT:
        return "keep"
    action = "offload" if choice.share == 1 else f"{choice.share:.0%} offloaded"
    if several:
        action += " to host memory" if choice.tier == "host" else " to drives"
    return action if choice.share == 1 else f"{action}, of"


def _group_text(rows: Sequence[_Row], action: str, why: str) -> str:
    name = rows[0].block.name
    if len(rows) > 1:
        name += f" .. {rows[-1].block.name} ({len(rows)} blocks)"
    stall = sum(row.times.store_stall + row.times.load_stall for row in rows)
    cost = f", waits {duration_text(stall)}" if stall > 1e-9 else ""
    size = size_text(sum(row.block.saved for row in rows))
    return f"{name}: {action} {size}: {why}{cost}"
