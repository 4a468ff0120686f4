"""Runs side by side as one rich table: a column per run, ratios to the first."""

from collections.abc import Callable, Sequence

from rich.table import Table

from examples.support.result import RunResult
from ssdtrain.storage.endurance import projected_life
from ssdtrain.text import duration_text, ratio_text, size_text


def comparison_table(
    runs: Sequence[RunResult], *, rated_bytes: float, titles: dict[str, str] | None = None, title: str = ""
) -> Table:
    """A row per figure; what moved to SSD is "-" in runs that wrote nothing.

    Args:
        runs: At least one; ratios are to the first.
        rated_bytes: Bytes the drive may be written in its life, for the projection.
        titles: Column headings by `RunResult.name`.
    """
    base = runs[0]

    def life(run: RunResult) -> str:
        return duration_text(projected_life(rated_bytes, run.bytes_written / run.steps, run.step_median))

    rows: list[tuple[str, Callable[[RunResult], str]]] = [
        ("final loss", lambda run: f"{run.final_loss:.6f}"),
        (
            f"losses and weights as {base.name}",
            lambda run: "" if run is base else "no" if run.differs_from(base) else "to the bit",
        ),
        ("activation memory, peak", _compared(base, size_text, lambda run: run.activation_peak_bytes)),
        ("process memory, peak", _compared(base, size_text, lambda run: run.resident_peak_bytes)),
        ("step time, median", _compared(base, duration_text, lambda run: run.step_median)),
        ("written to SSD per step", _per_step(size_text, lambda run: run.bytes_written)),
        ("read from SSD per step", _per_step(size_text, lambda run: run.bytes_read)),
        ("waited for SSD per step", _per_step(duration_text, lambda run: run.stall_seconds)),
        (f"SSD life, rated {rated_bytes / 1e12:.0f} TB", _if_written(life)),
    ]
    if base.device_peak_bytes is not None:
        rows.insert(
            4, ("CUDA memory, peak", _compared(base, size_text, lambda run: run.device_peak_bytes or 0))
        )
    table = Table(title=title or None, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column((titles or {}).get(run.name, run.name), justify="right")
    for name, cell in rows:
        table.add_row(name, *(cell(run) for run in runs))
    return table


Cell = Callable[[RunResult], str]
Figure = Callable[[RunResult], float]


def _compared(base: RunResult, text: Callable[[float], str], figure: Figure) -> Cell:
    def cell(run: RunResult) -> str:
        value = text(figure(run))
        return value if run is base else f"{value} ({ratio_text(figure(run), figure(base))})"

    return cell


def _if_written(cell: Cell) -> Cell:
    return lambda run: cell(run) if run.bytes_written else "-"


def _per_step(text: Callable[[float], str], figure: Figure) -> Cell:
    return _if_written(lambda run: text(figure(run) / run.steps))
