"""Draws docs/results/compact.png from what `benchmarks.compact` wrote: `python -m benchmarks.compact_plots`. Needs matplotlib."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.compact import VARIANTS
from examples.support.plot import COLOURS

RESULTS = Path("docs/results")


def draw(found: dict[str, Any], file: Path) -> None:
    """Bytes of one block, bytes of whole models, and the price in held-out loss, each by variant."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    block, peak, loss = figure.subplots(1, 3)
    _bars(
        block, {kind: found["activation_ratio"][kind] for kind in ("llama", "gpt")}, "saved bytes of a block"
    )
    peaks = {size: found["peak_ratio"][size] for size in ("60M", "350M", "1.3B")}
    _bars(peak, peaks, "weights, gradients, Adam, activations, logits")
    _gaps(loss, found)
    figure.savefig(file, dpi=120)


def _bars(axes: Axes, series: dict[str, dict[str, float]], title: str) -> None:
    names = [name for name in VARIANTS if name in next(iter(series.values()))]
    height = 0.8 / len(series)
    for row, (label, values) in enumerate(series.items()):
        places = [at + (row - (len(series) - 1) / 2) * height for at in range(len(names))]
        axes.barh(places, [values[name] for name in names], height, color=COLOURS[row + 1], label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25)
    axes.set_xlabel(f"{title} / without", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="center right")


def _gaps(axes: Axes, found: dict[str, Any]) -> None:
    """Each pair of seeds is a point, the mean a line."""
    plain = {run["seed"]: run["held_out"] for run in found["runs"] if run["variant"] == "full"}
    names = [name for name in VARIANTS if name in found["loss_gap"]]
    for at, name in enumerate(names):
        pairs = [
            100 * (run["held_out"] / plain[run["seed"]] - 1)
            for run in found["runs"]
            if run["variant"] == name and run["seed"] in plain
        ]
        axes.plot(pairs, [at] * len(pairs), "o", color=COLOURS[2], alpha=0.6)
        axes.plot([100 * found["loss_gap"][name]] * 2, [at - 0.3, at + 0.3], color=COLOURS[5], linewidth=2)
    axes.axvline(0, color=COLOURS[0], linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("held-out loss above the full run, %", fontsize=9)
    axes.grid(axis="x", alpha=0.3)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--results", type=Path, default=RESULTS / "2026-11-22-compact.json")
    chosen = made.parse_args()
    draw(json.loads(chosen.results.read_text()), RESULTS / "compact.png")


if __name__ == "__main__":
    main()
