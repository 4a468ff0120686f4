"""The numbers that sum a run up: each computed once, for the tiles, the tables and the comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from ssdtrain.metrics import Reduce
from ssdtrain.text import duration_text, size_text
from ssdtrain.tools.report.run import JournaledRun, ModuleUse, RankJournal, declared_metric, metric_named

WAITS = ("store_wait_seconds", "load_wait_seconds")


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page.

    Args:
        value: of a run; None: this run has no such value.
        text: the value with its unit.
        more: a second line, or "".
        less_is_better: None: neither; decides the colour of a comparison.
    """

    name: str
    value: Callable[[JournaledRun], float | None]
    text: Callable[[float], str]
    more: Callable[[JournaledRun], str] = lambda run: ""
    less_is_better: bool | None = True


def per_step(run: JournaledRun, name: str) -> float | None:
    """The mean over steps of the value of all ranks; None where no rank has it."""
    values = list(run.over_ranks(name).values())
    return statistics.fmean(values) if values else None


def _peak(run: JournaledRun, name: str) -> float | None:
    """The largest of all ranks at the end: since the plan that is followed began, which is the peak of the log and the table."""
    return max((v for journal in run.journals if (v := journal.last(name)) is not None), default=None)


def compared(run: JournaledRun, other: JournaledRun) -> list[str]:
    """Return what `run` has against `other` in lines of text: memory, time, and whether the script's values are equal."""
    lines = []
    for name, of, text in (
        ("memory", lambda one: _peak(one, "activation_peak_bytes"), size_text),
        ("time", _step_time, duration_text),
    ):
        mine, theirs = of(run), of(other)
        if mine is not None and theirs:
            lines.append(f"{name} x{mine / theirs:.2f} ({text(mine)} against {text(theirs)})")
    return [*lines, _equality(run, other)]


def _equality(run: JournaledRun, other: JournaledRun) -> str:
    """Say whether the values of the training script are equal in the steps that both runs have."""
    steps: set[int] = set()
    different: set[int] = set()
    others = {journal.label: journal for journal in other.journals}
    for mine in run.journals:
        theirs = others[mine.label].by_step if mine.label in others else {}
        for step, values in mine.by_step.items():
            shared = {
                name for name in values.keys() & theirs.get(step, {}).keys() if not declared_metric(name)
            }
            steps |= {step} if shared else set()
            different |= {step for name in shared if values[name] != theirs[step][name]}
    if not steps:
        return "bits not compared: no values of the script in both runs; add runtime.log_values(loss=loss.item())"
    if different:
        return f"bits differ from step {min(different)} on ({len(different)} of {len(steps)} steps)"
    return f"bits equal in {len(steps)} of {len(steps)} steps (values of log_values)"


def waited_share(journal: RankJournal) -> float:
    """Part of the step time of one rank that training waited for stores and loads, 0 to 1."""
    taken = journal.totals.get("step_seconds", 0.0)
    return sum(journal.totals.get(name, 0.0) for name in WAITS) / taken if taken else 0.0


def _waited(run: JournaledRun) -> float | None:
    return (
        max(map(waited_share, run.journals)) if any(run.has(n) for n in ("offloaded_bytes", *WAITS)) else None
    )


def _step_time(run: JournaledRun) -> float | None:
    values = list(run.over_ranks("step_seconds").values())
    return statistics.median(values) if values else None


def _wire_share(run: JournaledRun) -> float | None:
    raw, wire = (
        sum(run.total(f"comm/{dimension}/{name}") for dimension in run.dimensions())
        for name in ("raw_bytes", "wire_bytes")
    )
    return wire / raw if raw else None


def _without(run: JournaledRun) -> str:
    without, peak = _peak(run, "unoffloaded_peak_bytes"), _peak(run, "activation_peak_bytes")
    return f"x{peak / without:.2f} of {size_text(without)} without" if without and peak else ""


def _rate(run: JournaledRun) -> str:
    seconds = sum(run.over_ranks("step_seconds").values())
    # A step that was trained again counts once in both parts of the rate.
    rate = sum(run.over_ranks("ssd_bytes_written").values()) / seconds if seconds else 0.0
    return f"{size_text(run.total('ssd_bytes_written'))} in all, {size_text(rate)}/s" if seconds else ""


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if value < 0.995 else f"{100 * value:.0f}%"


TILES = (
    Tile("Activation peak", lambda run: _peak(run, "activation_peak_bytes"), size_text, _without),
    Tile("Step time", _step_time, duration_text, lambda run: f"median of {len(run.steps)} steps"),
    Tile("Waited for tiers", _waited, _percent, lambda run: "of step time, by the rank that waits most"),
    Tile(
        "To SSD per step",
        lambda run: per_step(run, "ssd_bytes_written") if run.has("ssd_bytes_written") else None,
        size_text,
        _rate,
    ),
    Tile(
        "SSD life",
        lambda run: run.last("ssd_life_seconds"),
        duration_text,
        lambda run: "at this rate, the first drive",
        less_is_better=False,
    ),
    Tile("Traffic sent", _wire_share, _percent, lambda run: "of " + ", ".join(run.dimensions())),
    Tile("Loss", lambda run: run.last("loss"), lambda value: f"{value:.4f}"),
)


def rank_rows(run: JournaledRun) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of ranks."""
    mean, median = statistics.fmean, statistics.median
    columns: list[tuple[str, Callable[[RankJournal], str]]] = [
        ("steps", lambda j: str(len(j.by_step))),
        ("step time, median", lambda j: _text(j, "step_seconds", median)),
        ("activation peak", lambda j: _text(j, "activation_peak_bytes")),
        ("without SSDTrain", lambda j: _text(j, "unoffloaded_peak_bytes")),
        ("saved / step", lambda j: _text(j, "saved_bytes", mean)),
        ("to SSD / step", lambda j: _text(j, "ssd_bytes_written", mean)),
        ("to host memory / step", lambda j: _text(j, "host_bytes_written", mean)),
        ("waited for stores", lambda j: _total(j, "store_wait_seconds")),
        ("waited for loads", lambda j: _total(j, "load_wait_seconds")),
        ("waited, of step time", lambda j: _percent(waited_share(j))),
        ("SSD life", lambda j: _text(j, "ssd_life_seconds")),
    ]
    rows = [[journal.label, *(text(journal) for _, text in columns)] for journal in run.journals]
    kept = [0] + [i + 1 for i in range(len(columns)) if any(row[i + 1] not in ("", "0 B") for row in rows)]
    heads = ["", *(head for head, _ in columns)]
    return [heads[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _text(journal: RankJournal, name: str, figure: Callable[[list[float]], float] = itemgetter(-1)) -> str:
    """Return a figure of the values of a rank, by default the last one, with its unit; "" without values."""
    values = journal.values(name)
    return metric_named(name).unit.text(figure(values)) if values else ""


def _total(journal: RankJournal, name: str) -> str:
    return metric_named(name).unit.text(journal.totals[name]) if name in journal.totals else ""


def traffic_rows(run: JournaledRun) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of parallel dimensions. Bytes are those of all ranks."""
    rows = []
    for name in run.dimensions():
        sent, raw = run.total(f"comm/{name}/wire_bytes"), run.total(f"comm/{name}/raw_bytes")
        calls, compressed = run.total(f"comm/{name}/calls"), run.total(f"comm/{name}/compressed")
        means = [per_step(run, f"comm/{name}/{part}") or 0.0 for part in ("raw_bytes", "wire_bytes")]
        waits = [duration_text(run.total(f"comm/{name}/{part}_seconds")) for part in ("codec", "wait")]
        ratios = f"x{sent / raw:.3f}" if raw else "", f"{compressed / calls:.0%}" if calls else ""
        rows.append([name, *map(size_text, means), *ratios, *waits])
    return ["dimension", "uncompressed", "sent", "ratio", "calls compressed", "codec", "waited"], rows


def module_rows(modules: Mapping[str, ModuleUse]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of modules."""
    rows = [
        [name, size_text(u.offloaded_bytes), size_text(u.kept_bytes), duration_text(u.load_wait_seconds)]
        for name, u in modules.items()
    ]
    return ["module", "offloaded", "kept", "waited for loads"], rows


def metric_rows(run: JournaledRun) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of every value in the journals."""
    rows = []
    for name in run.names:
        metric = metric_named(name)
        values = list(run.over_ranks(name).values())
        if not any(values):
            continue
        how = {Reduce.SUM: "sum", Reduce.MAX: "most", Reduce.MIN: "least"}[metric.ranks]
        total = metric.unit.text(run.total(name)) if metric.cumulative else ""
        texts = [metric.unit.text(value) for value in (statistics.fmean(values), max(values), values[-1])]
        rows.append([name, how, total, *texts])
    return ["value", "over ranks", "total", "mean / step", "highest step", "last step"], rows
