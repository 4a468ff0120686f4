"""A plan in words: what each block does and why, what was predicted and measured, and what more memory or faster drives would
bring."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from ssdtrain.config.units import GiB
from ssdtrain.planner.model.types import DEVICE, KEPT, Block, BlockTimes, Choice, StepTimeline
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, SearchProblem, play
from ssdtrain.planner.search import search
from ssdtrain.text import duration_text, gain_text, rate_text, size_text, with_cause

__all__ = ["Outcome", "alternatives", "limit_text", "plan_table"]

NO_MODULES: Mapping[str, str] = MappingProxyType({})
"""Modules of a plan whose blocks have names of their own."""


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


BRIEF_IN_PARTS = 0.25
"""Effort of a search for what something better would bring, where parts of blocks may leave."""


def alternatives(
    problem: SearchProblem, limits: Limits, objective: Objective, known: Sequence[str]
) -> list[tuple[str, Plan | None]]:
    """The plan if one thing were better, memory, or the bandwidth of the tiers: the best of a brief search, or the one with the
    actions `known`. None: there is none."""
    cases: list[tuple[str, SearchProblem, Limits]] = []
    if limits.device is not None:
        cases.append(("1 GiB more", problem, replace(limits, device=limits.device + GiB)))
    machine = problem.machine
    if machine.tiers:
        tiers = tuple(replace(tier, write=2 * tier.write, read=2 * tier.read) for tier in machine.tiers)
        faster = replace(problem, machine=replace(machine, tiers=tiers))
        drives = any(tier.name == "ssd" for tier in machine.tiers)
        cases.append((f"{'drives' if drives else 'host memory'} twice as fast", faster, limits))
    found: list[tuple[str, Plan | None]] = []
    for name, given, within in cases:
        try:
            effort = BRIEF_IN_PARTS if given.by_parts else 1.0
            plans = search(given, within, objective, runners_up=0, known=known, effort=effort)
            found.append((name, plans[0]))
        except NoPlan:
            found.append((name, None))
    return found


def limit_text(problem: SearchProblem, plan: Plan) -> str:
    """What keeps a plan from offloading more: the tier that is slower than forward saves or backward needs, by the larger ratio,
    or with which twice as fast the peak would be lower. "" where all that may leave does."""
    choices = [problem.choice(name) for name in plan.actions]
    whole = all(
        choice.recompute or (choice.tier != DEVICE and choice.share == 1 and not choice.shares)
        for choice in choices
    )
    if whole or not problem.machine.tiers:
        return ""
    tier, loads = problem.machine.tiers[-1], _loads(problem)
    name = {"ssd": "drive", "host": "host memory"}.get(tier.name, tier.name)
    if max(loads, default=0.0) <= 1:
        peak = _peak_with_faster_tiers(problem, plan)
        if peak >= LOWER * plan.peak:
            return "the order of the step: what is kept would not lower the peak"
        rate = rate_text(min(tier.write, tier.read))
        return f"{name} of {rate}: twice as fast, the peak would be {size_text(peak)}"
    if loads[0] >= loads[1]:
        return f"{name} writes {rate_text(tier.write)}, forward saves {rate_text(loads[0] * tier.write)}"
    return f"{name} reads {rate_text(tier.read)}, backward needs {rate_text(loads[1] * tier.read)}"


LOWER = 0.95
"""Part of a plan's peak below which another one is lower."""


def _peak_with_faster_tiers(problem: SearchProblem, plan: Plan) -> int:
    """Return the peak were tiers twice as fast, with the last of them taking all that may leave."""
    problem = problem.under(plan.state)
    tiers = tuple(replace(tier, write=2 * tier.write, read=2 * tier.read) for tier in problem.machine.tiers)
    last = {name for name, choice in problem.actions.items() if choice.tier == tiers[-1].name}
    if not last:
        return plan.peak
    decided, name = set(problem.decided), min(last)
    leaving = [name if number in decided else action for number, action in enumerate(plan.actions)]
    return play(replace(problem, machine=replace(problem.machine, tiers=tiers)), leaving).peak


def plan_table(
    title: str,
    problem: SearchProblem,
    plans: Sequence[Plan],
    kept: StepTimeline,
    *,
    limit: int | None = None,
    better: Sequence[tuple[str, Plan | None]] = (),
    outcome: Outcome | None = None,
    modules: Mapping[str, str] = NO_MODULES,
) -> str:
    """A plan for one rank: a line for the modules of one name in all layers that are treated alike, what is predicted, the next
    best plans, what more would bring, and what was measured.

    Args:
        title: what decided.
        plans: best first.
        kept: the step with everything kept.
        limit: bytes of activations; None: none.
        better: what `alternatives` returns.
        outcome: a step under the best plan; None: there was none yet.
        modules: modules by the names of blocks that have those of regions.
    """
    best, lines = plans[0], [f"{title} decided, for each microbatch:"]
    actions, slow = iter(best.actions), _too_slow(problem, best)
    for number, (blocks, times) in enumerate(zip(problem.chunks, best.timeline.blocks, strict=True)):
        several = f"chunk {number}: " if len(problem.chunks) > 1 else ""
        groups: dict[tuple[str, str, str], list[_Row]] = {}
        for block, action, took in zip(blocks, actions, times, strict=False):
            for row in _rows(problem, block, action, took, modules, slow):
                groups.setdefault((row.module, row.action, row.why), []).append(row)
        lines += [f"  {several}{_group_text(group)}" for group in groups.values()]
    what, passes = "activation peak", "forward and backward"
    if best.state is not None and problem.state is not None:
        what, passes = "peak of activations and model state", "step"
        chunks = len(problem.state.chunks)
        lines.append(
            f"  model state: {best.state.persistent} of {chunks} chunks stay, {best.state.buffers:g} of the others are there "
            f"at a time: {size_text(best.state.limit)}"
        )
    bound = "" if limit is None else f" of {size_text(limit)}"
    for which, plan in zip(["predicted", *["next best"] * 3], plans, strict=False):
        after = f", waits {duration_text(plan.timeline.stall)}" if plan.timeline.stall > 1e-9 else ""
        if plan.timeline.step_wait > 1e-9:
            after += f", waits {duration_text(plan.timeline.step_wait)} for the CPU's steps"
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
            f"  measured: activation peak {size_text(outcome.peak_bytes)}; step {duration_text(outcome.step_seconds)}, waits "
            f"{duration_text(outcome.stall_seconds)}"
        )
        waited = outcome.stall_seconds / outcome.step_seconds if outcome.step_seconds else 0.0
        gain = gain_text(outcome.peak_bytes, outcome.unoffloaded_peak_bytes, waited)
        lines.append("  " + "; ".join(filter(None, [gain, with_cause(limit_text(problem, best), waited)])))
        for name, seconds in sorted(outcome.load_waits.items(), key=lambda item: -item[1])[:3]:
            lines.append(f"  since the start backward waited {duration_text(seconds)} for {name}")
    return "\n".join(lines)


def _ratio(plan: Plan, kept: StepTimeline) -> float:
    return plan.seconds / kept.seconds if kept.seconds else 1.0


class _Row(NamedTuple):
    """A block or a part of one, the name of its action, what that costs, and where it is."""

    problem: SearchProblem
    block: Block
    name: str
    choice: Choice
    times: BlockTimes
    module: str
    """Name of the module, with {} for the number of the layer."""
    layer: int
    """Number of the layer; -1: there is none."""
    slow: bool
    """Faster tiers would take more."""

    @property
    def action(self) -> str:
        """What is done with it, for the line of its group."""
        if not self.problem.only_moves or self.choice.tier == DEVICE:
            return self.name if self.choice.share == 1 else f"{self.choice.share:.0%} to {self.name}"
        several = len(self.problem.machine.tiers) > 1
        to = "" if not several else " to host memory" if self.choice.tier == "host" else " to drives"
        return f"offload{to}" if self.choice.share == 1 else f"{self.choice.share:.0%} offloaded{to}"

    @property
    def why(self) -> str:
        """The one reason for it."""
        if self.choice.tier != DEVICE:
            return "hidden" if self.times.hidden else "not hidden"
        if not self.problem.only_moves:
            return ""
        return "the tiers have no time for it" if self.slow else "it would not lower the peak"

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


def _rows(
    problem: SearchProblem,
    block: Block,
    action: str,
    times: BlockTimes,
    modules: Mapping[str, str],
    slow: bool,
) -> Iterator[_Row]:
    """A block's row, or where it leaves in part those of its parts."""
    choice, place = problem.choice(action), _place_of(modules.get(block.name, block.name))
    if not choice.shares:
        yield _Row(problem, block, action, choice, times, *place, slow)
        return
    count = sum(share > 0 for share in choice.shares)
    each = BlockTimes(times.store_stall / count, times.load_stall / count)
    for part, share in zip(block.parts, choice.shares, strict=False):
        if part.saved + part.small:
            name = action.partition(":")[0] if share else "keep"
            what = replace(problem.choice(name), share=share) if share else KEPT
            yield _Row(problem, part, name, what, each, *_place_of(part.name), slow)


_REGION = re.compile(r"chunk \d+, region (\d+)")


def _place_of(name: str) -> tuple[str, int]:
    """Return `_Row.module` and `_Row.layer` of a block: "layers.3.mlp.act" is ("layers.{}.mlp", 3). A region whose module is not
    known is counted as a saved tensor."""
    if (region := _REGION.fullmatch(name)) is not None:
        return "saved tensors {}", int(region[1])
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if place is None:
        return name, -1
    return ".".join([*parts[:place], "{}", *parts[place + 1 : place + 2]]), int(parts[place])


def _too_slow(problem: SearchProblem, plan: Plan) -> bool:
    """Whether a tier moves less than forward saves, or backward needs, in the same time, or the peak would be lower were it
    faster."""
    loads = _loads(problem)
    return bool(loads) and (max(loads) > 1 or _peak_with_faster_tiers(problem, plan) < LOWER * plan.peak)


def _loads(problem: SearchProblem) -> list[float]:
    """How much of the bandwidth of the last tier forward and backward would take, if everything left."""
    blocks = problem.blocks
    seconds = [sum(getattr(block, part) for block in blocks) for part in ("forward", "backward")]
    if not problem.machine.tiers or not all(seconds):
        return []
    tier, saved = problem.machine.tiers[-1], sum(block.saved for block in blocks)
    return [saved / took / rate for took, rate in zip(seconds, (tier.write, tier.read), strict=True)]


def _layers_text(layers: Sequence[int]) -> str:
    """Numbers in order as ranges: "0-11, 13"."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _group_text(rows: Sequence[_Row]) -> str:
    """Modules of one name, action and reason: "model.layers.0-11.mlp: offload, 12 x 3.20 MiB, hidden"."""
    first = rows[0]
    sizes: dict[int, int] = {}
    for row in rows:
        sizes[row.layer] = sizes.get(row.layer, 0) + row.block.saved + row.block.small
    alike = len(set(sizes.values())) == 1 and len(sizes) > 1
    size = f"{len(sizes)} x {size_text(sizes[first.layer])}" if alike else size_text(sum(sizes.values()))
    if first.choice.compress:
        size += f" to {size_text(sum(row.block.compressed.saved for row in rows if row.block.compressed))} (lossy)"
    if first.choice.encode:
        size += f" to {size_text(sum(row.block.encoded.inputs for row in rows if row.block.encoded))}"
    cost = sum(row.cost for row in rows)
    parts = [first.action, size, first.why, f"costs {duration_text(cost)}" if cost > 1e-9 else ""]
    name = first.module.format(_layers_text(list(sizes)))
    return f"{name or 'outside of all modules'}: {', '.join(part for part in parts if part)}"
