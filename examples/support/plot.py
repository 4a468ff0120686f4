"""Activation memory over one step, one line per run, as a PNG. Needs matplotlib (the extra `plot`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from examples.support.activation_meter import Timeline
from ssdtrain.config.units import MiB
from ssdtrain.text import size_text

# Okabe and Ito's palette: distinguishable with colour blindness.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00")


class Drawn(Protocol):
    """A run, such as a `RunResult`; of these fields."""

    @property
    def name(self) -> str: ...
    @property
    def activation_peak_bytes(self) -> int: ...
    @property
    def activation_timeline(self) -> Timeline: ...
    @property
    def backward_began(self) -> float | None: ...


class MatplotlibMissing(RuntimeError):
    """matplotlib is not installed."""


def plot_activation_memory(
    runs: Sequence[Drawn], path: Path, *, titles: dict[str, str] | None = None, title: str = ""
) -> Path:
    """Draws every run's `activation_timeline` in MiB. Forwards are drawn equally long, and so are backwards: the picture is of
    memory, and how long a step took is in the table.

    Args:
        titles: Names in the legend by `Drawn.name`.

    Raises:
        MatplotlibMissing: with the command that installs it.
        ValueError: No run has a timeline.
    """
    if not any(run.activation_timeline for run in runs):
        raise ValueError("no run has a timeline of activation memory: nothing to plot")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MatplotlibMissing("a plot needs matplotlib: pip install 'ssdtrain[plot]'") from error

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run, colour in zip(runs, COLOURS * (len(runs) // len(COLOURS) + 1), strict=False):
        if not run.activation_timeline:
            continue
        progress = [_progress(run, at) for at, _ in run.activation_timeline]
        mebibytes = [alive / MiB for _, alive in run.activation_timeline]
        label = f"{(titles or {}).get(run.name, run.name)}: peak {size_text(run.activation_peak_bytes)}"
        axes.plot(progress, mebibytes, drawstyle="steps-post", color=colour, label=label, linewidth=1.6)
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_xticks([0, 1, 2], ["forward begins", "backward begins", "backward ends"])
    axes.set_ylabel("activations alive for backward, MiB")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 2)
    axes.grid(alpha=0.3)
    axes.legend()
    if title:
        axes.set_title(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _progress(run: Drawn, seconds: float) -> float:
    """0 where the step begins, 1 where its backward does, 2 at its end."""
    end = run.activation_timeline[-1][0]
    began = end / 2 if run.backward_began is None else run.backward_began
    if seconds <= began:
        return seconds / began if began else 1.0
    return 1 + (seconds - began) / (end - began)
