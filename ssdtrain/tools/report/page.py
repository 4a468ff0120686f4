"""The report as one HTML file, which loads nothing from anywhere."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files

from ssdtrain import __version__
from ssdtrain.metrics import Reduce, Unit
from ssdtrain.tools.report.chart import Bar, ChartLine, bar_chart, line_chart
from ssdtrain.tools.report.figures import (
    TILES,
    Tile,
    metric_rows,
    module_rows,
    per_step,
    rank_rows,
    traffic_rows,
)
from ssdtrain.tools.report.run import JournaledRun, metric_named

_STYLE = files("ssdtrain.tools.report").joinpath("report.css").read_text()
_SCRIPT = files("ssdtrain.tools.report").joinpath("report.js").read_text()
MOST_RANKS = 8  # drawn one by one; more are drawn as their highest, median and lowest
MOST_MODULES = 14


def page(run: JournaledRun, against: JournaledRun | None = None) -> str:
    """Return the HTML.

    Args:
        against: a second run: its values stand beside those of `run`.
    """
    title = f"{run.name} against {against.name}" if against else run.name
    cards = [
        _comparison(run, against) if against else "",
        _memory(run, against),
        _step_time(run, against),
        _waits(run, against),
        _bytes(run, against),
        _module_bytes(run),
        _module_waits(run),
        _traffic(run),
        _loss(run, against),
        _decisions(run),
        _card(
            "Ranks", "Memory and bytes of each process; waits are totals.", _rows(rank_rows(run)), wide=True
        ),
        _folded("All values", metric_rows(run)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>SSDTrain report: {escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(_scope(run))}</p></header>"
        f'<section class="tiles">{"".join(_tile(tile, run, against) for tile in TILES)}</section>'
        f'<div class="cards">{"".join(cards)}</div>'
        f"<footer>SSDTrain {__version__}. Values come from the journals of report.path; docs/metrics.md explains each.</footer>"
        f"</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _scope(run: JournaledRun) -> str:
    ranks = len({journal.rank for journal in run.journals})
    again = sum(journal.lines - len(journal.by_step) for journal in run.journals)
    text = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, steps {run.steps[0]} to {run.steps[-1]}"
    return text + (f", {again} steps trained again after a restart" if again else "")


def _tile(tile: Tile, run: JournaledRun, against: JournaledRun | None) -> str:
    value = tile.value(run)
    if value is None:
        return ""
    other = tile.value(against) if against else None
    more = escape(tile.more(run)) if other is None else _change(tile, value, other)
    return (
        f'<div class="tile"><div class="name">{escape(tile.name)}</div><div class="value">{escape(tile.text(value))}</div>'
        f'<div class="more">{more}</div></div>'
    )


def _change(tile: Tile, value: float, other: float) -> str:
    text = escape(tile.text(other))
    if not other:
        return f"against {text}"
    change = value / other - 1
    verdict = ""
    if tile.less_is_better is not None and abs(change) >= 0.005:
        verdict = "better" if (change < 0) == tile.less_is_better else "worse"
    return f'<span class="{verdict}">{change:+.1%}</span> against {text}'


def _card(title: str, lead: str, body: str, *, wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return (
        f'<section class="{kind}"><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{body}</section>'
    )


def _rows(table: tuple[Sequence[str], Sequence[Sequence[str]]]) -> str:
    heads, rows = table
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _by_rank(run: JournaledRun, name: str) -> list[ChartLine]:
    """A line for each rank, or three over many."""
    journals = [journal for journal in run.journals if name in journal.totals]
    if len(journals) > MOST_RANKS:
        most, least = run.over_ranks(name, Reduce.MAX), run.over_ranks(name, Reduce.MIN)
        middle = {
            step: statistics.median(
                j.by_step[step][name] for j in journals if name in j.by_step.get(step, {})
            )
            for step in most
        }
        return [
            ChartLine("highest rank", most),
            ChartLine("median rank", middle, 2),
            ChartLine("lowest rank", least, 1),
        ]
    return [
        ChartLine(
            journal.label,
            {step: values[name] for step, values in journal.by_step.items() if name in values},
            index,
        )
        for index, journal in enumerate(journals)
    ]


def _runs(run: JournaledRun, against: JournaledRun | None, name: str, how: Reduce) -> list[ChartLine]:
    """One line for each of two runs."""
    pairs = [(run, 0), (against, 1)]
    return [ChartLine(found.name, found.over_ranks(name, how), colour) for found, colour in pairs if found]


def _memory(run: JournaledRun, against: JournaledRun | None) -> str:
    name, without = "activation_peak_bytes", "unoffloaded_peak_bytes"
    if not run.has(name):
        return ""
    if against:
        lines = _runs(run, against, name, Reduce.MAX)
        lead = "Highest rank. Each point is the highest value since the start of the run or the last reset of the peak."
    else:
        lines = _by_rank(run, name)
        lines.append(
            ChartLine("without SSDTrain, highest rank", run.over_ranks(without, Reduce.MAX), 7, dashed=True)
        )
        lead = (
            "Bytes alive for backward: saved tensors and SSDTrain's buffers. Each point is the highest value since the start of "
            "the run or the last reset of the peak."
        )
    return _card("Peak of activation memory", lead, line_chart(lines, Unit.BYTES, "activations"))


def _step_time(run: JournaledRun, against: JournaledRun | None) -> str:
    lines = _runs(run, against, "step_seconds", Reduce.MAX) if against else _by_rank(run, "step_seconds")
    # 0 of a first step: nothing said when it began.
    lines = [
        replace(line, points={step: value for step, value in line.points.items() if value}) for line in lines
    ]
    lead = (
        "From the beginning of each step to its end; where the loop does not say when a step begins, from the end of the one "
        "before, and that of the first step from its first forward."
    )
    return _card("Step time", lead, line_chart(lines, Unit.SECONDS, "time"))


def _waits(run: JournaledRun, against: JournaledRun | None) -> str:
    names = {"store_wait_seconds": "for stores", "load_wait_seconds": "for loads"}
    names |= {f"comm/{d}/wait_seconds": f"for {d} collectives" for d in run.dimensions()}
    names = {name: label for name, label in names.items() if run.has(name) or (against and against.has(name))}
    lead = "Time that training stood still, in each step; of the rank that waited longest."
    lines = []
    for index, (name, label) in enumerate(names.items()):
        lines.append(ChartLine(label, run.over_ranks(name), index))
        if against:
            lines.append(ChartLine(f"{label}, {against.name}", against.over_ranks(name), index, dashed=True))
    if not lines:
        return _card("Waits", lead, '<p class="none">Training waited for nothing.</p>')
    return _card("Waits", lead, line_chart(lines, Unit.SECONDS, "waited"))


def _bytes(run: JournaledRun, against: JournaledRun | None) -> str:
    names = {
        "saved_bytes": "saved for backward",
        "ssd_bytes_written": "written to SSD",
        "ssd_bytes_read": "read from SSD",
        "host_bytes_written": "written to host memory",
        "avoided_write_bytes": "writes avoided",
        "kept_bytes": "kept in memory",
    }
    names = {name: label for name, label in names.items() if run.has(name)}
    if not names:
        return ""
    lines = [
        ChartLine(label, run.over_ranks(name), index) for index, (name, label) in enumerate(names.items())
    ]
    if against:
        name = "ssd_bytes_written"
        lines.append(
            ChartLine(f"{names.get(name, name)}, {against.name}", against.over_ranks(name), 1, dashed=True)
        )
    lead = "What forward saved and where it went, in each step; the sum of all ranks."
    return _card("Bytes per step", lead, line_chart(lines, Unit.BYTES, "bytes"))


def _module_bytes(run: JournaledRun) -> str:
    modules = run.modules()
    if not modules:
        return ""
    largest = sorted(modules, key=lambda name: -modules[name].saved_bytes)[:MOST_MODULES]
    bars = [
        Bar(name, [modules[name].offloaded_bytes, modules[name].kept_bytes])
        for name in modules
        if name in largest
    ]
    steps = sorted({journal.modules_step for journal in run.journals if journal.modules})
    which = f"step {steps[0]}" if len(steps) == 1 else f"one of the steps {steps[0]} to {steps[-1]}"
    lead = f"Bytes that modules saved for backward in {which}, the sum of all ranks: offloaded, and kept in memory."
    if len(modules) > len(largest):
        lead += f" The {len(largest)} of {len(modules)} modules that saved most."
    table = _rows(module_rows(modules))
    body = bar_chart(bars, Unit.BYTES, ["offloaded", "kept"])
    return _card("Bytes by module", lead, f"{body}<details><summary>All modules</summary>{table}</details>")


def _module_waits(run: JournaledRun) -> str:
    waits = run.waits()
    if not waits:
        return ""
    bars = [Bar(name, [seconds]) for name, seconds in list(waits.items())[:MOST_MODULES]]
    lead = (
        "Time that backward waited for tensors that these modules saved, summed over steps and ranks. A journal names the three "
        "longest waits of a step, so each is at least this much."
    )
    return _card("Waits by module", lead, bar_chart(bars, Unit.SECONDS, ["waited"]))


def _traffic(run: JournaledRun) -> str:
    if not run.dimensions():
        return ""
    bars = [
        Bar(name, [per_step(run, f"comm/{name}/{part}") or 0.0 for part in ("raw_bytes", "wire_bytes")])
        for name in run.dimensions()
    ]
    chart = bar_chart(bars, Unit.BYTES, ["uncompressed", "sent"])
    lead = "Bytes per step that all ranks together send, by parallel dimension. Times are totals of the rank with the most."
    return _card("Traffic between ranks", lead, chart + _rows(traffic_rows(run)))


def _decisions(run: JournaledRun) -> str:
    """The last ones of each rank, those of the first rank open."""
    parts: list[str] = []
    for journal in [journal for journal in run.journals if journal.decisions][:MOST_RANKS]:
        step, text = journal.decisions[-1]
        times = f", made {len(journal.decisions)} times" if len(journal.decisions) > 1 else ""
        head = f"{journal.label}, since step {step}{times}"
        shown = "" if parts else " open"
        parts.append(f"<details{shown}><summary>{escape(head)}</summary><pre>{escape(text)}</pre></details>")
    if not parts:
        return ""
    lead = (
        'What "plan" or amount "auto" decided for each run of blocks, why, and what was predicted, and why messages went '
        "uncompressed. Ranks plan for themselves."
    )
    return _card("Decisions", lead, "".join(parts), wide=True)


def _loss(run: JournaledRun, against: JournaledRun | None) -> str:
    if not run.has("loss"):
        return ""
    lead = "As the training script gave it to log_values(loss=...)."
    lines = _runs(run, against, "loss", Reduce.MAX)
    return _card("Loss", lead, line_chart(lines, Unit.COUNT, "loss", from_zero=False))


def _comparison(run: JournaledRun, against: JournaledRun) -> str:
    rows = []
    for name in dict.fromkeys([*run.names, *against.names]):
        unit, both = metric_named(name).unit, [per_step(run, name), per_step(against, name)]
        if not any(both):
            continue
        texts = ["" if value is None else unit.text(value) for value in both]
        ratio = f"x{both[0] / both[1]:.3f}" if both[0] is not None and both[1] else ""
        rows.append([name, *texts, ratio])
    return _folded(
        "Comparison of all values, mean per step", (["value", run.name, against.name, "ratio"], rows)
    )


def _folded(title: str, table: tuple[Sequence[str], Sequence[Sequence[str]]]) -> str:
    return f'<section class="card wide"><details><summary>{title}</summary>{_rows(table)}</details></section>'
