"""A run in the formats of other programs: the traces of all ranks for Perfetto, journals for Prometheus.

Names of Prometheus' text format (for node_exporter's textfile collector) have letters, digits and "_" of ASCII alone. SSDTrain's
own metrics do too; what a training script or another package calls its values is a label, which may have any text.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ssdtrain.output_files import replace_file
from ssdtrain.tools.report.run import JournaledRun, RankJournal, declared_metric

LOGGED = "ssdtrain_logged"
"""Name of all values that SSDTrain does not declare."""


def prometheus(run: JournaledRun) -> str:
    """Return counters as totals of all lines, gauges as in the last line.

    Labels are run, rank and engine, dimension for values of a parallel dimension, and name for values of the training script.
    """
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
            value = journal.totals.get(name) if cumulative else journal.last(name)
            if value is not None:
                lines.append(f"{exposed}{_labels(run, journal, labels)} {value!r}")
    steps = ["# TYPE ssdtrain_steps_total counter"]
    steps += [f"ssdtrain_steps_total{_labels(run, journal, {})} {journal.lines}" for journal in run.journals]
    return "\n".join(line for lines in [steps, *samples.values()] for line in lines) + "\n"


def write_prometheus(run: JournaledRun, file: Path) -> None:
    """Replace `file` in one step: a collector, which is another user, never reads half of it.

    Raises:
        OSError: the file cannot be written.
    """
    with replace_file(file) as stream:
        os.fchmod(stream.fileno(), 0o644)  # a collector is another user
        stream.write(prometheus(run).encode())


def _labels(run: JournaledRun, journal: RankJournal, more: dict[str, str]) -> str:
    labels = {"run": run.name, "rank": str(journal.rank), "engine": str(journal.engine), **more}
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half of a surrogate pair is no UTF-8
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def merge_traces(directory: Path, output: Path) -> list[int]:
    """Write the events of every `trace-rank-N.json` in `directory` and below it to `output`, on one time line. The clocks
    of nodes are taken to agree.

    Returns:
        Numbers of the ranks.

    Raises:
        ValueError: there is no trace, or a file is not one.
        OSError: a file cannot be read or written.
    """
    found = [_read_trace(path) for path in sorted(directory.rglob("trace-rank-*.json"))]
    if not found:
        raise ValueError(
            f'{directory} has no trace-rank-N.json: set report.trace, such as "trace": [10, 11], and give the directory of '
            "report.path once these steps are over"
        )
    start = min(trace["otherData"]["unix_microseconds"] for trace in found)
    events: list[dict[str, Any]] = []
    for trace in found:
        shift = trace["otherData"]["unix_microseconds"] - start
        for event in trace["traceEvents"]:
            events.append({**event, "ts": event["ts"] + shift} if "ts" in event else event)
    about = [trace["otherData"] for trace in found]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"ranks": about}})
    with replace_file(output) as stream:
        stream.write(text.encode())
    return sorted({int(one["rank"]) for one in about})


def _read_trace(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ValueError("no regular file")
        trace = json.loads(path.read_text(encoding="utf-8"))
        about = trace["otherData"]
        about["rank"], about["unix_microseconds"] = int(about["rank"]), int(about["unix_microseconds"])
        for event in trace["traceEvents"]:
            float(event.get("ts", 0)), dict(event)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a trace ({error!r}): remove it, or give another directory"
        ) from error
    found: dict[str, Any] = trace
    return found
