"""Recompute, offload, keep, and mixtures of them: activation memory against throughput, on this CPU.

    python -m benchmarks.rok --json --plot docs/results/rok.png

For a GPT, a BERT and a T5 of several depths and batch sizes: each strategy is carried out in turn, interleaved, in one process
(`benchmarks.planner.Trial`), beside the choice of `"plan": "auto"`, which is made from a profile of the same model: the lowest
peak whose predicted step takes at most 1.02 of the time of keeping everything.

A point is the measured peak of activations (bytes) and the throughput (tokens per second of forward and backward, from the
median of interleaved steps). `choice_slowdown_median` and `choice_slowdown_max` are of the step time of the choice over
that of keeping everything, `choice_peak_ratio_median` and `choice_peak_ratio_max` of its peak over that of keeping everything,
each over all cases: models, depths and batch sizes.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import finish, hardware, parser
from benchmarks.planner import Trial
from examples.support.plot import COLOURS
from ssdtrain.config.units import MiB
from ssdtrain.planner.plans import Limits, Objective
from ssdtrain.planner.search import search

CHOICE = "choice of the planner"
SLOWDOWN = 0.02
"""Of the planner's choice, predicted, at most; the default of `plan.max_slowdown`."""


def strategies(blocks: int) -> dict[str, tuple[str, ...]]:
    """An action for each block, by the name of the strategy."""
    half = blocks // 2
    keep, recompute, offload = ("keep",), ("recompute",), ("offload",)
    return {
        "keep": keep * blocks,
        "recompute": recompute * blocks,
        "offload": offload * blocks,
        "recompute half": recompute * half + keep * (blocks - half),
        "offload half": offload * half + keep * (blocks - half),
        "offload, recompute": ((offload + recompute) * blocks)[:blocks],
    }


def choice_of(trial: Trial) -> tuple[str, ...]:
    """The planner's choice without a memory limit: the lowest predicted peak within `SLOWDOWN`."""
    kept = trial.predicted(("keep",) * len(trial.blocks))
    limits = Limits(seconds=kept.seconds * (1 + SLOWDOWN))
    [best, *_] = search(trial.problem, limits, Objective(0, 1))
    actions = dict(zip((block.name for block in trial.problem.blocks), best.actions, strict=True))
    return tuple({"ssd": "offload"}.get(actions[name], actions[name]) for name in trial.names)


def measure(trial: Trial, tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Peak (bytes) and throughput (tokens per second) by strategy."""
    plans = {**strategies(len(trial.blocks)), CHOICE: choice_of(trial)}
    peaks = [trial.peak(plan) for plan in plans.values()]
    times = [statistics.median(one) for one in trial.seconds(list(plans.values()), rounds)]
    return {
        name: {"peak_bytes": peak, "tokens_per_second": tokens / seconds, "plan": " ".join(plan)}
        for (name, plan), peak, seconds in zip(plans.items(), peaks, times, strict=True)
    }


def run(arguments: Any, directory: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    points: list[dict[str, Any]] = []
    for kind in arguments.models.split(","):
        for layers in map(int, arguments.layers.split(",")):
            for batch in map(int, arguments.batches.split(",")):
                size = {"hidden": arguments.hidden, "sequence": arguments.sequence, "batch": batch}
                trial = Trial(kind, directory, layers=layers, **size)
                found = measure(trial, batch * arguments.sequence, arguments.rounds)
                trial.close()
                points += [
                    {"model": kind, "layers": layers, "batch": batch, "strategy": name, **one}
                    for name, one in found.items()
                ]
                chosen, kept = found[CHOICE], found["keep"]
                print(
                    f"{kind}, {layers} layers, batch {batch}: {chosen['plan']}: "
                    f"peak x{chosen['peak_bytes'] / kept['peak_bytes']:.2f}, "
                    f"throughput x{chosen['tokens_per_second'] / kept['tokens_per_second']:.3f} of keeping everything",
                    flush=True,
                )
    return {**summary(points), "points": points}


def summary(points: list[dict[str, Any]]) -> dict[str, float]:
    """Of the choice relative to keeping everything, the medians and the worst over all cases."""
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for one in points:
        case = one["model"], one["layers"], one["batch"]
        cases.setdefault(case, {})[one["strategy"]] = one
    slower = [
        case["keep"]["tokens_per_second"] / case[CHOICE]["tokens_per_second"] for case in cases.values()
    ]
    lower = [case[CHOICE]["peak_bytes"] / case["keep"]["peak_bytes"] for case in cases.values()]
    return {
        "cases": len(cases),
        "choice_slowdown_median": statistics.median(slower),
        "choice_slowdown_max": max(slower),
        "choice_peak_ratio_median": statistics.median(lower),
        "choice_peak_ratio_max": max(lower),
    }


def draw(points: list[dict[str, Any]], file: Path) -> None:
    """A panel for each model and depth: a curve for each strategy over batch sizes, and the planner's choice as stars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(one["model"] for one in points))
    depths = list(dict.fromkeys(one["layers"] for one in points))
    names = [name for name in dict.fromkeys(one["strategy"] for one in points) if name != CHOICE]
    figure = Figure(figsize=(4 * len(depths), 3 * len(models) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(models), len(depths), squeeze=False)
    for row, model in zip(panels, models, strict=True):
        for axes, layers in zip(row, depths, strict=True):
            here = [one for one in points if one["model"] == model and one["layers"] == layers]
            for name, colour in zip(names, COLOURS, strict=True):
                _curve(axes, here, name, color=colour, marker="o", linewidth=1.2, markersize=4)
            _curve(axes, here, CHOICE, color="red", marker="*", linestyle="", markersize=11, fillstyle="none")
            axes.set_title(f"{model}, {layers} layers", fontsize=10)
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("peak of activations, MiB", fontsize=9)
    for row in panels:
        row[0].set_ylabel("tokens per second", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _curve(axes: Any, points: list[dict[str, Any]], name: str, **style: Any) -> None:
    chosen = [one for one in points if one["strategy"] == name]
    axes.plot(
        [one["peak_bytes"] / MiB for one in chosen],
        [one["tokens_per_second"] for one in chosen],
        label=name,
        **style,
    )


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--models", default="gpt,bert,t5", help="of benchmarks.gpu.models")
    made.add_argument("--layers", default="3,4,12", help="depths, in blocks")
    made.add_argument("--batches", default="4,8", help="sequences of a microbatch")
    made.add_argument("--hidden", type=int, default=128, help="width, a multiple of 64")
    made.add_argument("--sequence", type=int, default=128, help="tokens")
    made.add_argument("--rounds", type=int, default=3, help="interleaved timings of each strategy")
    made.add_argument("--directory", type=Path, default=None, help="on the drive; default: temporary")
    made.add_argument("--plot", type=Path, default=None, help="a PNG; needs matplotlib")
    chosen = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as temporary:
        directory = chosen.directory or Path(temporary)
        figures = {"benchmark": "rok", **run(chosen, directory)}
        if chosen.plot is not None:
            draw(figures["points"], chosen.plot)
        finish({**figures, **hardware(directory), "torch": torch.__version__}, chosen.json)


if __name__ == "__main__":
    main()
