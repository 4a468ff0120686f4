"""The journals of a run in Prometheus' text format, for node_exporter's textfile collector or for scraping."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from ssdtrain.report.run import RankJournal, Run, metric_named

__all__ = ["prometheus", "write_prometheus"]


def prometheus(run: Run) -> str:
    """Counters as totals of all lines, gauges as in the last line. Labels are run, rank and engine, and dimension for values of a
    parallel dimension."""
    samples: dict[str, list[str]] = {}
    for name in run.names:
        metric = metric_named(name)
        dimension, own = (name.split("/", 2)[1:]) if name.startswith("comm/") else ("", name)
        exposed = "ssdtrain_" + ("comm_" if dimension else "") + re.sub(r"\W", "_", own)
        exposed += "_total" if metric.cumulative else ""
        lines = samples.setdefault(
            exposed, [f"# TYPE {exposed} {'counter' if metric.cumulative else 'gauge'}"]
        )
        for journal in run.journals:
            value = journal.totals.get(name) if metric.cumulative else _last(journal, name)
            if value is not None:
                lines.append(f"{exposed}{_labels(run, journal, dimension)} {value!r}")
    steps = ["# TYPE ssdtrain_steps_total counter"]
    steps += [f"ssdtrain_steps_total{_labels(run, journal, '')} {journal.lines}" for journal in run.journals]
    return "\n".join(line for lines in [steps, *samples.values()] for line in lines) + "\n"


def write_prometheus(run: Run, file: Path) -> None:
    """Replaces `file` in one step: a collector never reads half of it.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(prometheus(run))
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _last(journal: RankJournal, name: str) -> float | None:
    values = journal.values(name)
    return values[-1] if values else None


def _labels(run: Run, journal: RankJournal, dimension: str) -> str:
    labels = {"run": run.name, "rank": str(journal.rank), "engine": str(journal.engine)}
    if dimension:
        labels["dimension"] = dimension
    inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{{{inside}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
