"""Traced steps in the trace event format (JSON) that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ssdtrain.device import Timestamp
from ssdtrain.profile.passes import PassTimes
from ssdtrain.profile.time_spans import Span, Spans

__all__ = ["TracedStep", "trace_of"]

DEVICE = "saved tensors, as the device computes"
QUEUES = ("stores", "loads")


@dataclass
class TracedStep:
    """What was recorded of a step. Seconds of `time.perf_counter`, where nothing else is said."""

    number: int
    spans: Spans
    began: float
    unix: float
    """`time.time()` at `began`."""
    mark: Timestamp | None = None
    """`began` on the clock of the device; None: nothing is known of the device."""
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(when, bytes alive for backward from then on)."""
    passes: list[PassTimes] = field(default_factory=list)
    """On the clock of the device."""


def trace_of(steps: list[TracedStep], rank: int, host: str) -> str:
    """The content of a trace file: one process, which is the rank, with a track for each thread, for the device, and for
    as many stores and loads as were under way at once.

    Times count from the first step; "otherData" has its begin as microseconds since 1970, by which ranks are put together.
    """
    start = steps[0].began
    tracks = _Tracks(rank)
    events: list[dict[str, Any]] = []
    for step in steps:
        # By the clock of the first step: a clock that is set meanwhile must not part the steps of a rank.
        threads = [span for span in step.spans.found if not isinstance(span.track, str)]
        for span in threads:
            if span.kind == "step":
                tracks.of(span.track, "training")
        for span in sorted(threads, key=lambda span: (span.began, -span.ended)):
            events.append(_event(span, start, rank, tracks.of(span.track, "autograd or other")))
        for queue in QUEUES:
            moved = sorted((span for span in step.spans.found if span.track == queue), key=lambda s: s.began)
            for lane, span in _lanes(moved):
                events.append(_event(span, start, rank, tracks.of((queue, lane), queue)))
        events += _device(step, start, rank, tracks)
        for when, nbytes in step.memory:
            stamp = _nanoseconds(when - start) / 1e3
            values = {"bytes": nbytes}
            events.append(
                {"ph": "C", "name": "activation memory", "pid": rank, "tid": 0, "ts": stamp, "args": values}
            )
    about = {
        "rank": rank,
        "host": host,
        "steps": [step.number for step in steps],
        "dropped": sum(step.spans.dropped for step in steps),
        "unix_microseconds": steps[0].unix * 1e6,
    }
    named = [_named("process_name", rank, 0, f"rank {rank} ({host})"), *tracks.named()]
    return json.dumps({"traceEvents": [*named, *events], "displayTimeUnit": "ms", "otherData": about})


def _named(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}


class _Tracks:
    """Numbers of tracks, and their names."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[Any, int] = {}
        self._names: list[str] = []

    def of(self, key: Any, name: str) -> int:
        if key not in self._numbers:
            self._names.append(name)
            self._numbers[key] = len(self._names)
        return self._numbers[key]

    def named(self) -> Iterator[dict[str, Any]]:
        for number, name in enumerate(self._names, 1):
            yield _named("thread_name", self._rank, number, name)
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": self._rank,
                "tid": number,
                "args": {"sort_index": number},
            }


def _nanoseconds(seconds: float) -> int:
    # Begin and end are rounded alike, so that what nests still nests.
    return round(seconds * 1e9)


def _event(span: Span, start: float, rank: int, track: int) -> dict[str, Any]:
    began, ended = _nanoseconds(span.began - start), _nanoseconds(span.ended - start)
    event = {
        "ph": "X",
        "cat": span.kind,
        "name": span.name,
        "pid": rank,
        "tid": track,
        "ts": began / 1e3,
        "dur": (ended - began) / 1e3,
    }
    if span.nbytes:
        event["args"] = {"bytes": span.nbytes}
    return event


def _lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Each span, in order of its begin, with the first lane that is free then."""
    ends: list[float] = []
    for span in spans:
        lane = next((index for index, ended in enumerate(ends) if ended <= span.began), len(ends))
        ends[lane : lane + 1] = [span.ended]
        yield lane, span


def _device(step: TracedStep, start: float, rank: int, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    mark = step.mark.seconds() if step.mark is not None else None
    if mark is None:
        return
    offset = step.began - mark
    for one in step.passes:
        track = tracks.of("device", DEVICE)
        whole = Span(
            track, one.kind, f"{one.kind}, chunk {one.chunk}", one.began + offset, one.ended + offset
        )
        yield _event(whole, start, rank, track)
        for name, began, ended in one.hooks:
            what = "save" if one.kind == "forward" else "use"
            yield _event(
                Span(track, what, f"{what} {name}", began + offset, ended + offset), start, rank, track
            )
