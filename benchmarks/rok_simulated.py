"""Memory against speed of every mixture of recompute, offload and keep, in virtual time: exact and repeatable figures.

    python -m benchmarks.rok_simulated --json --plot docs/results/rok.png

Four GPT layers that save 10 GB/s, a link of 25 GB/s and drives of several speeds (`benchmarks.simulated_device`); the real
engine carries out all 81 plans. A point has the peak of activations and the speed of the second step, both over those of
keeping everything. The planner chooses without having seen a plan run: once the lowest peak whose step takes at most 1.02 of
keeping everything ("auto"), and the shortest step at each of four memory limits. `choice_over_best` is the step time of these
four over the best of all plans within the limit, the worst of all drives.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parser
from benchmarks.planner_simulated import BLOCKS, DRIVES, problem_of, run
from benchmarks.simulated_device import GB, Load, gpt
from examples.support.plot import COLOURS
from ssdtrain.config.units import MiB
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.plans import Limits, NoPlan, Objective
from ssdtrain.planner.search import search

ACTIONS = ("recompute", "offload", "keep")
LIMITS = (0.2, 0.4, 0.6, 0.8)
"""Of the way from the peak of recomputing everything to that of keeping everything."""
SLOWDOWN = 0.02

Plan = tuple[str, ...]


def of_drive(speed: float) -> dict[str, Any]:
    """All plans with a drive of `speed` GB/s, and the planner's choices."""
    load = Load(gpt(BLOCKS, MiB, MiB / (10 * GB)), 25 * GB, speed * GB, 16 * MiB, MiB)
    found = {plan: run(load, plan)[0] for plan in product(ACTIONS, repeat=BLOCKS)}
    _, machine = run(load, ("offload",) * BLOCKS)
    problem = problem_of(load, machine)
    kept, again = found[("keep",) * BLOCKS], found[("recompute",) * BLOCKS]
    choices = [[problem.actions["keep"]] * BLOCKS]
    predicted = simulate(problem.chunks, choices, problem.order, machine, steps=2).seconds
    auto: Plan = search(problem, Limits(seconds=predicted * (1 + SLOWDOWN)), Objective(0, 1))[0].actions
    chosen = {auto: run(load, auto)[0]}  # blocks may leave in part
    at_limits, over_best = [], []
    for share in LIMITS:
        limit = round(again.peak + share * (kept.peak - again.peak))
        try:
            choice: Plan = search(problem, Limits(limit))[0].actions
        except NoPlan:
            continue
        at_limits.append(choice)
        chosen[choice], _ = run(load, choice)
        best = min(one.seconds for one in found.values() if one.peak <= limit)
        over_best.append(chosen[choice].seconds / best)

    def point(plan: Plan) -> dict[str, Any]:
        one = found[plan] if plan in found else chosen[plan]
        return {"plan": " ".join(plan), "peak": one.peak / kept.peak, "speed": kept.seconds / one.seconds}

    return {
        "plans": [point(plan) for plan in found],
        "auto": point(auto),
        "at_limits": [point(plan) for plan in at_limits],
        "choice_over_best": max(over_best, default=None),
    }


def draw(drives: dict[str, Any], file: Path) -> None:
    """A panel for each drive: every plan, those of one action each, and what the planner chooses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(drives), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(drives), squeeze=False, sharey=True)[0]
    for axes, (name, one) in zip(panels, drives.items(), strict=True):
        _dots(axes, one["plans"], "mixtures", color="#bbbbbb", marker=".", s=18)
        for action, colour in zip(ACTIONS, COLOURS[1:], strict=False):
            whole = [point for point in one["plans"] if set(point["plan"].split()) == {action}]
            _dots(axes, whole, f"{action} everything", color=colour, marker="o", s=45)
        hollow = {"facecolors": "none", "edgecolors": "red"}
        _dots(axes, one["at_limits"], "chosen for a memory limit", marker="s", s=70, **hollow)
        _dots(axes, [one["auto"]], 'chosen by "auto"', marker="*", s=190, **hollow)
        axes.set_title(f"drive of {name} GB/s", fontsize=10)
        axes.set_xlim(0, 1.05)
        axes.grid(alpha=0.3)
        axes.set_xlabel("peak of activations / keep", fontsize=9)
    panels[0].set_ylabel("speed / keep", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _dots(axes: Any, points: list[dict[str, Any]], label: str, **style: Any) -> None:
    axes.scatter([one["peak"] for one in points], [one["speed"] for one in points], label=label, **style)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--drives", default=",".join(f"{speed:g}" for speed in DRIVES), help="GB/s each way")
    made.add_argument("--plot", type=Path, default=None, help="a PNG; needs matplotlib")
    chosen = made.parse_args()
    drives = {}
    for speed in chosen.drives.split(","):
        one = drives[speed] = of_drive(float(speed))
        print(
            f"drive of {speed} GB/s: auto {one['auto']['plan']}: peak x{one['auto']['peak']:.2f}, speed "
            f"x{one['auto']['speed']:.3f}; at memory limits x{one['choice_over_best']:.3f} of the best step",
            flush=True,
        )
    if chosen.plot is not None:
        draw(drives, chosen.plot)
    worst = max(one["choice_over_best"] for one in drives.values() if one["choice_over_best"])
    finish({"benchmark": "rok_simulated", "choice_over_best": worst, "drives": drives}, chosen.json)


if __name__ == "__main__":
    main()
