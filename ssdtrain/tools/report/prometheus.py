"""The journals of a run in Prometheus' text format, for node_exporter's textfile collector.

Names of the format have letters, digits and "_" of ASCII alone. SSDTrain's own metrics do too; what a training script or another
package calls its values is a label, which may have any text.
"""

from __future__ import annotations

import os
from pathlib import Path

from ssdtrain.output_files import replace_file
from ssdtrain.tools.report.run import RankJournal, Run, declared_metric

__all__ = ["prometheus", "write_prometheus"]

LOGGED = "ssdtrain_logged"
"""Name of all values that SSDTrain does not declare."""


def prometheus(run: Run) -> str:
    """Counters as totals of all lines, gauges as in the last line. Labels are run, rank and engine, dimension for values of a
    parallel dimension, and name for values of the training script."""
    samples: dict[str, list[str]] = {}
    for name in run.names:
        metric, labels = declared_metric(name), {}
        cumulative = metric is not None and metric.cumulative
        if metric is None:
            exposed, labels = LOGGED, {"name": name}
        elif name.startswith("comm/"):
            kind, dimension, own = name.split("/")
            exposed, labels = f"ssdtrain_{kind}_{own}", {"dimension": dimension}
        else:
            exposed = f"ssdtrain_{name.replace('/', '_')}"
        exposed += "_total" if cumulative else ""
        lines = samples.setdefault(exposed, [f"# TYPE {exposed} {'counter' if cumulative else 'gauge'}"])
        for journal in run.journals:
            value = journal.totals.get(name) if cumulative else _last(journal, name)
            if value is not None:
                lines.append(f"{exposed}{_labels(run, journal, labels)} {value!r}")
    steps = ["# TYPE ssdtrain_steps_total counter"]
    steps += [f"ssdtrain_steps_total{_labels(run, journal, {})} {journal.lines}" for journal in run.journals]
    return "\n".join(line for lines in [steps, *samples.values()] for line in lines) + "\n"


def write_prometheus(run: Run, file: Path) -> None:
    """Replaces `file` in one step: a collector, which is another user, never reads half of it.

    Raises:
        OSError: the file cannot be written.
    """
    with replace_file(file) as stream:
        os.fchmod(stream.fileno(), 0o644)  # a collector is another user
        stream.write(prometheus(run).encode())


def _last(journal: RankJournal, name: str) -> float | None:
    values = journal.values(name)
    return values[-1] if values else None


def _labels(run: Run, journal: RankJournal, more: dict[str, str]) -> str:
    labels = {"run": run.name, "rank": str(journal.rank), "engine": str(journal.engine), **more}
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half of a surrogate pair is no UTF-8
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
