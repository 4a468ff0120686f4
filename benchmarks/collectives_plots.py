"""Draws docs/results/collectives-*.png from what `benchmarks.collectives` and `benchmarks.loss_gap` wrote.

    python -m benchmarks.collectives_plots --loss out/loss_gap.json --network out/wire.json out/speed.json

A file that is not there is left out, with its plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.support.plot import COLOURS

ORDER = ("uncompressed", "safe", "balanced", "aggressive", "paper-zhybrid", "naive")
GOALS = {"safe": 0.27, "balanced": 0.20, "aggressive": 0.14}


def figure(width: float = 9, height: float = 4.5) -> Figure:
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def draw_losses(path: Path, into: Path) -> None:
    """Training loss by step, mean over seeds, a panel for each layout."""
    results = json.loads(path.read_text())
    runs, steps = results["runs"], results["settings"]["steps"]
    layouts = sorted({run["layout"] for run in runs}, reverse=True)
    made = figure(12, 4.5)
    for place, layout in enumerate(layouts):
        axes = made.add_subplot(1, len(layouts), place + 1)
        for variant, colour in zip(ORDER, COLOURS, strict=True):
            curves = [run["curve"] for run in runs if (run["layout"], run["variant"]) == (layout, variant)]
            if len(curves) > 1:
                mean = [statistics.fmean(points) for points in zip(*curves, strict=True)]
                at = [(n + 1) * steps / len(mean) for n in range(len(mean))]
                axes.plot(at, mean, color=colour, linewidth=1.3, label=f"{variant} ({len(curves)} seeds)")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, mean of seeds")
        axes.set_title(layout, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    made.savefig(into / "collectives-loss.png", dpi=120)


def draw_bytes(found: dict[str, Any], into: Path) -> None:
    """Bytes at the interface over those of the uncompressed run, with the goals."""
    ratios = found["dp_wire_ratio"]
    names = [name for name in ORDER if name in ratios]
    made = figure(7, 4)
    axes = made.add_subplot()
    axes.bar(names, [ratios[name] for name in names], color=COLOURS[2])
    for n, name in enumerate(names):
        axes.text(n, ratios[name], f"{ratios[name]:.3f}", ha="center", va="bottom", fontsize=9)
        if name in GOALS:
            axes.hlines(GOALS[name], n - 0.4, n + 0.4, color=COLOURS[5], linestyle=":")
    axes.set_ylabel("bytes at the interface / uncompressed fp32 (dotted: goal)")
    axes.set_ylim(0, 0.35)
    made.savefig(into / "collectives-bytes.png", dpi=120)


def draw_speed(found: dict[str, Any], into: Path) -> None:
    """Tokens per second of every variant, by rate of the network."""
    rates = {name: found[name] for name in ("1g", "10g") if name in found}
    made = figure(4.5 * max(1, len(rates)), 4)
    for place, (rate, one) in enumerate(rates.items()):
        axes = made.add_subplot(1, len(rates), place + 1)
        names = list(one["tokens_per_s"])
        axes.bar(names, [one["tokens_per_s"][name] for name in names], color=COLOURS[2])
        for n, name in enumerate(names):
            axes.text(
                n, one["tokens_per_s"][name], f"{one['tokens_per_s'][name]:.0f}", ha="center", va="bottom"
            )
        axes.set_title(f"{rate}: communication is {one['comm_fraction']:.2f} of a step", fontsize=10)
        axes.set_ylabel("tokens per second")
    made.savefig(into / "collectives-speed.png", dpi=120)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--loss", type=Path)
    made.add_argument("--network", type=Path, nargs="*", default=[])
    made.add_argument("--into", type=Path, default=Path("docs/results"))
    options = made.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    if options.loss is not None:
        draw_losses(options.loss, options.into)
    for path in options.network:
        found = json.loads(path.read_text())
        if "dp_wire_ratio" in found:
            draw_bytes(found, options.into)
        if set(found.get("details", {})) & {"1g", "10g"}:
            draw_speed(found["details"], options.into)


if __name__ == "__main__":
    main()
