"""The traces of all ranks in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ssdtrain.output_files import replace_file

__all__ = ["merge_traces"]


def merge_traces(directory: Path, output: Path) -> list[int]:
    """Writes the events of every `trace-rank-N.json` in `directory` and below it to `output`, on one time line. The clocks
    of nodes are taken to agree.

    Returns:
        The ranks.

    Raises:
        ValueError: there is no trace, or a file is not one.
        OSError: a file cannot be read or written.
    """
    found = [_read(path) for path in sorted(directory.rglob("trace-rank-*.json"))]
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


def _read(path: Path) -> dict[str, Any]:
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
