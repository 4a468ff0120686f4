"""Activation memory over a step that follows a plan, predicted against measured, as a PNG. Needs matplotlib (the extra `plot`).

Note: [What a line shows]
Bytes alive for backward, over the part of the step's forwards and backwards that has passed: so the two lines may take other
times, which the legend has. A measured line does not show what recomputation brings back inside of a backward, at most one
block's, where the checkpoint is not reentrant: the meter sees what the forward saves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ssdtrain.config.units import MiB
from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.output_files import replace_file
from ssdtrain.planner.plans import Plan, SearchProblem, play
from ssdtrain.text import duration_text, size_text

__all__ = ["Line", "MemoryPanel", "PlanPlot", "draw_memory"]

logger = logging.getLogger("ssdtrain")

Line = Sequence[tuple[float, int]]
"""(seconds, bytes alive from then on)"""

# Of Okabe and Ito's palette: distinguishable with colour blindness.
PREDICTED, MEASURED, LIMIT = "#D55E00", "#0072B2", "#CC79A7"


class MemoryPanel(NamedTuple):
    """One plan."""

    title: str
    predicted: Line
    measured: Line
    limit: int | None = None
    """Bytes."""


def draw_memory(panels: Sequence[MemoryPanel], file: Path) -> None:
    """Draw a panel for each plan, side by side. See Note: [What a line shows].

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(every, panels, strict=False):
        for name, line, colour in (
            ("predicted", panel.predicted, PREDICTED),
            ("measured", panel.measured, MEASURED),
        ):
            ended = line[-1][0] or 1.0
            peak = size_text(max(nbytes for _, nbytes in line))
            axes.plot(
                [when / ended for when, _ in line],
                [nbytes / MiB for _, nbytes in line],
                drawstyle="steps-post",
                color=colour,
                linewidth=1.4,
                linestyle="-" if name == "measured" else "--",
                label=f"{name}: peak {peak}, {duration_text(ended)}",
            )
        if panel.limit is not None:
            label = f"limit: {size_text(panel.limit)}"
            axes.axhline(panel.limit / MiB, color=LIMIT, linestyle=":", linewidth=1.6, label=label)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        axes.set_xlabel("part of the step's forwards and backwards", fontsize=9)
        axes.set_ylabel("activations alive, MiB", fontsize=9)
    for axes in every:
        axes.axis("off")
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(file) as stream:
        figure.savefig(stream, dpi=110, format="png")


class PlanPlot:
    """Draws the second step of plans 1, 2, 3, 4, 8, 16 ..., since the first one still waits for transfers of the plan before. A
    plan that was replaced before does not count.

    If it cannot be drawn, whatever the reason, a warning is logged, nothing is drawn any more and training continues.

    Args:
        file: is written again for each plan that is drawn; None: nothing is drawn.
        meter: of the engine.
    """

    def __init__(self, file: Path | None, meter: ActivationMeter) -> None:
        self._file, self._meter = file, meter
        self._panel: MemoryPanel | None = None  # without what is measured
        self._plans = 0  # that were followed for two steps, or may yet be
        self._steps = 0  # that have ended under the plan
        self._began = 0.0  # the step that is measured, by the clock of the meter

    def planned(self, problem: SearchProblem, plan: Plan, limit: int | None) -> None:
        """A plan is followed from the next step on.

        Args:
            limit: bytes of activations; None: none.
        """
        self.cancel()
        if self._file is None:
            return
        self._plans += 1
        if self._plans > 3 and self._plans & (self._plans - 1):
            return
        alone = replace(problem, steps=2, beside=0, after=0.0)
        predicted = play(alone, plan.actions, memory=True).timeline.memory
        left = None if limit is None else limit - problem.beside
        self._panel = MemoryPanel(plan.summary(), predicted, (), left)

    def cancel(self) -> None:
        """No plan is followed."""
        if self._panel is not None:
            self._plans -= 1
            if self._steps == 1:
                self._stop()
        self._panel, self._steps = None, 0

    def step_ended(self) -> None:
        """Called at the end of each step, before the next plan is made."""
        if self._panel is None or self._file is None:
            return
        self._steps += 1
        if self._steps == 1:
            self._start()
            return
        found = self._stop()
        panel, self._panel, self._steps = self._panel, None, 0
        if len(found) < 2:
            return  # nothing was saved
        began = found[1][0]
        measured = [(max(0.0, when - began), nbytes) for when, nbytes in found]
        try:
            draw_memory([panel._replace(measured=measured)], self._file)
        except Exception as error:  # noqa: BLE001 - an optional picture: anything that matplotlib raises
            logger.warning(
                "ssdtrain.plan.plot: %s cannot be written (%s: %s); nothing is drawn any more, training continues",
                self._file,
                type(error).__name__,
                error,
            )
            self._file = None

    def _start(self) -> None:
        meter = self._meter
        meter.start_timeline()
        self._began = meter.clock()
        meter.timeline.append((self._began, meter.live_bytes))

    def _stop(self) -> Line:
        meter = self._meter
        found = [entry for entry in meter.timeline if entry[0] >= self._began]
        meter.stop_timeline()
        return found
