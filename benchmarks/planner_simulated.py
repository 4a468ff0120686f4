"""The planner's predictions and choice on the simulated device, in virtual time: the real engine, exact and repeatable figures.

A GPT's layers, a link and a drive of a GPU's ratios (`benchmarks.simulated_device`). All plans of keep, recompute and offload for
each layer are run; the second step of each is compared with what the cost model says, and the planner's choice at a memory limit
with the fastest of all that keep to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.simulated_device import GB, GPT_OPERATORS, Load, gpt
from ssdtrain.config.units import MiB
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.policy import KEEP, OFFLOAD, Action
from ssdtrain.planner.memory_plot import Line, MemoryPanel
from ssdtrain.planner.model import types as step
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.plans import Limits, NoPlan, SearchProblem, actions_for
from ssdtrain.planner.regions import AdaptivePolicy
from ssdtrain.planner.search import search
from tests.support.simulated.training import HOOK, LAUNCH, Machine, train

__all__ = ["memory_panels", "simulated"]

BLOCKS = 4
OPERATORS = len(GPT_OPERATORS)
DRIVES = (3.0, 6.0, 12.0, 25.0)
"""GB/s."""


@dataclass(frozen=True)
class Run:
    """The second step of a plan."""

    seconds: float
    peak: int
    memory: Line = ()
    """By the time line of the stream that computes, where it was asked for."""


def run(load: Load, plan: Sequence[str], *, memory: bool = False) -> tuple[Run, step.Machine]:
    """What it takes, and the machine as the cost model sees it."""
    with Machine(load.pcie, [(load.drive, load.drive)]) as machine:
        policy = AdaptivePolicy()
        actions: list[Action] = []
        for action in plan:
            name, _, shares = action.partition(":")
            one = OFFLOAD if name == "offload" else KEEP
            if shares:
                actions += [one if int(share) else KEEP for share in shares]
            else:
                actions += [one] * (1 if action == "recompute" else OPERATORS)
        policy.follow({0: actions})
        options = EngineOptions(
            min_bytes=1024,
            in_flight=load.in_flight,
            buffer=load.buffer,
            prefetch=load.buffer // 2,
            staged=True,
        )
        engine = machine.engine(options, policy=policy)
        again = [
            range(number * OPERATORS, (number + 1) * OPERATORS)
            for number, action in enumerate(plan)
            if action == "recompute"
        ]
        train(machine, engine, load.layers, order=load.order, recomputed=again)
        meter = engine.meter
        if memory:  # the host is ahead of the device: when it comes to what changes now is known afterwards
            meter.start_timeline()
            meter.clock = machine.device.compute.record  # type: ignore[assignment]
        engine.reset_peak()
        record = train(machine, engine, load.layers, order=load.order, seed=1, recomputed=again)
        assert not record.wrong, record.wrong
        events: Sequence[tuple[Any, int]] = meter.timeline
        line = [(max(0.0, event.seconds() - record.began), nbytes) for event, nbytes in events]
        found = Run(record.ended - record.began, engine.snapshot().activation_peak_bytes, line)
        tier = step.Tier("offload", load.drive, load.drive, latency=100e-6, depth=1 << 30)
        seen = step.Machine(
            (tier,),
            step.Link(load.pcie, load.pcie),
            engine.mover.stores.limit,
            max(engine.prefetcher.limit, 1),
            max(engine.mover.departures.limit, 1),
            hook=HOOK + LAUNCH,
        )
        return found, seen


def problem_of(load: Load, machine: step.Machine) -> SearchProblem:
    """The load as the planner is told it."""
    blocks = []
    for number in range(len(load.layers) // OPERATORS):
        layers = load.layers[number * OPERATORS : (number + 1) * OPERATORS]
        forward = sum(layer.forward for layer in layers)
        saved = sum(sum(layer.saved) for layer in layers)
        backward = sum(layer.backward for layer in layers)
        parts = tuple(
            step.Block("", layer.forward, layer.backward, sum(layer.saved), first_operator=layer.forward)
            for layer in layers
        )
        blocks.append(
            step.Block(
                f"block {number}",
                forward,
                backward,
                saved,
                recompute=forward,
                inputs=layers[0].saved[0],
                parts=parts,
            )
        )
    order = [step.Pass("forward" if kind == "forward" else "backward", number) for kind, number in load.order]
    return SearchProblem([blocks], order, machine, actions_for(machine), by_parts=True)


def memory_panels() -> list[MemoryPanel]:
    """Memory over a step, predicted against measured: with a drive that keeps up with the model, of offloading everything and of
    a mixture; with one that does not, of offloading everything and of what is chosen for a limit."""
    panels = []
    for drive in (12.0, 3.0):
        load = Load(gpt(BLOCKS, MiB, MiB / (10 * GB)), 25 * GB, drive * GB, 16 * MiB, MiB)
        whole, machine = run(load, ("offload",) * BLOCKS, memory=True)
        problem = problem_of(load, machine)
        kept, again = (run(load, (action,) * BLOCKS)[0].peak for action in ("keep", "recompute"))
        limit = round(again + 0.4 * (kept - again))
        other: tuple[str, ...] = ("recompute", "recompute", "offload", "keep")
        if drive < 10:
            other = search(replace(problem, by_parts=False), Limits(limit))[0].actions
        most = limit if drive < 10 else None
        cases = [(("offload",) * BLOCKS, whole, None), (other, run(load, other, memory=True)[0], most)]
        for plan, found, bound in cases:
            choices = problem.choices(plan)
            predicted = simulate(problem.chunks, choices, problem.order, machine, steps=2, memory=True)
            counts = ", ".join(f"{plan.count(name)} {name}" for name in dict.fromkeys(plan))
            title = f"simulated device, drive of {drive:g} GB/s: {counts}"
            panels.append(MemoryPanel(title, predicted.memory, found.memory, bound))
    return panels


def against_all(load: Load) -> dict[str, Any]:
    """Every plan of one load."""
    every = list(product(("keep", "recompute", "offload"), repeat=BLOCKS))
    found: dict[tuple[str, ...], Run] = {}
    peak_errors, time_errors = [], []
    _, machine = run(load, ("offload",) * BLOCKS)
    problem = problem_of(load, machine)
    for plan in every:
        found[plan], _ = run(load, plan)
        choices = [[problem.actions[action] for action in plan]]
        predicted = simulate(problem.chunks, choices, problem.order, machine, steps=2)
        peak_errors.append(predicted.peak_bytes / found[plan].peak - 1)
        time_errors.append(predicted.seconds / found[plan].seconds - 1)
    kept, again = found[("keep",) * BLOCKS], found[("recompute",) * BLOCKS]
    choices_over_best, speeds, over = [], [], []
    for share in (0.2, 0.4, 0.6, 0.8):
        limit = round(again.peak + share * (kept.peak - again.peak))
        try:
            choice, _ = run(load, search(problem, Limits(limit))[0].actions)
        except NoPlan:
            continue
        best = min(one.seconds for one in found.values() if one.peak <= limit)
        choices_over_best.append(choice.seconds / best)
        over.append(choice.peak / limit)
        speeds.append(again.seconds / choice.seconds)
    return {
        "plans": len(every),
        "peak_error": max(map(abs, peak_errors)),
        "peak_error_median": statistics.median(map(abs, peak_errors)),
        "step_time_error": max(map(abs, time_errors)),
        "step_time_error_median": statistics.median(map(abs, time_errors)),
        "choice_over_best": max(choices_over_best),
        "choice_peak_over_limit": max(over),
        "speed_over_recompute": min(speeds),
    }


def simulated() -> dict[str, Any]:
    """The worst of all loads, and each."""
    loads: dict[str, Any] = {}
    for drive in DRIVES:
        load = Load(gpt(BLOCKS, 4 * MiB, 4 * MiB / (10 * GB)), 25 * GB, drive * GB, 16 * MiB, MiB)
        found = loads[f"drive {drive:g}, PCIe 25"] = against_all(load)
        print(
            f"simulated, drive {drive:g} GB/s: {found['plans']} plans, peak within {found['peak_error']:.1%} (median "
            f"{found['peak_error_median']:.1%}), time within {found['step_time_error']:.1%} (median "
            f"{found['step_time_error_median']:.1%}), choice x{found['choice_over_best']:.3f} of the best",
            flush=True,
        )
    worst = {
        name: max(found[name] for found in loads.values())
        for name in ("peak_error", "step_time_error", "choice_over_best", "choice_peak_over_limit")
    }
    plans = sum(found["plans"] for found in loads.values())
    fastest = loads[f"drive {DRIVES[-1]:g}, PCIe 25"]["speed_over_recompute"]
    return {"plans": plans, **worst, "speed_over_recompute": fastest, "loads": loads}
