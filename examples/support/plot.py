"""Activation memory over one step, one line per run, as a PNG. Needs matplotlib (the extra `plot`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from examples.support.activation_meter import Timeline
from ssdtrain.config.units import MiB
from ssdtrain.telemetry.text import size_text

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
    """Draws every run's `activation_timeline` (seconds into the step, MiB) and marks where backward began.

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
        seconds = [at for at, _ in run.activation_timeline]
        mebibytes = [alive / MiB for _, alive in run.activation_timeline]
        label = f"{(titles or {}).get(run.name, run.name)}: peak {size_text(run.activation_peak_bytes)}"
        axes.plot(seconds, mebibytes, drawstyle="steps-post", color=colour, label=label, linewidth=1.6)
        if run.backward_began is not None:
            axes.axvline(run.backward_began, color=colour, linestyle=":", linewidth=1)
    axes.set_xlabel("seconds into the step (dotted: backward begins)")
    axes.set_ylabel("activations alive for backward, MiB")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    if title:
        axes.set_title(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
