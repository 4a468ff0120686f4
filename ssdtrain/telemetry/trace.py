"""`report.trace`: records chosen steps, and writes them in the trace event format that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssdtrain.comm import Communicator
from ssdtrain.device import Timestamp
from ssdtrain.features import UNNAMED, Feature, Forward, Microbatch, Placement, Step
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.output_files import replace_file
from ssdtrain.profile.modules import ModuleNames
from ssdtrain.profile.passes import PassTimes, StepRecord
from ssdtrain.profile.time_spans import Span, Spans
from ssdtrain.storage import forks

logger = logging.getLogger("ssdtrain")


class StepTrace(Feature):
    """Records the spans of chosen steps of the engine and the communicator. Other steps run as without it.

    The number of a step is known when it ends: a step is recorded where the one before had the number before it, or where it is
    the first of this process and 1 is chosen, and dropped where it ends with a number that was not chosen.

    Args:
        steps: their numbers, as the training loop counts them, else from 1.
        file: written whole after each recorded step.
        place: of this rank.
        engine: that offloads; None: not enabled.
        comm: None: not enabled.
    """

    def __init__(
        self,
        steps: Sequence[int],
        file: Path,
        place: Placement,
        engine: OffloadEngine | None,
        comm: Communicator | None,
    ) -> None:
        self._steps = frozenset(steps)
        self._file = file
        self._place = place
        self._engine, self._comm = engine, comm
        self._modules = ModuleNames() if engine is None else engine.modules
        self._models: list[weakref.ref[nn.Module]] = []
        self._next = 1
        self._recording: _StepRecording | None = None
        self._turn = threading.RLock()
        """Held to begin or end a recording: a forward, the end of a step and that of the runtime may come on several threads."""
        forks.track(self)
        self._ended: list[tuple[TracedStep, StepRecord | None]] = []
        self._written = 0

    def after_fork(self) -> None:
        """Make another lock in a forked child: a thread of the parent may have held this one."""
        self._turn = threading.RLock()

    def attach(self, model: nn.Module) -> None:
        self._models.append(weakref.ref(model))
        if self._recording is not None:
            self._modules.watch(model, owner=self)

    def on_step_begin(self) -> None:
        self._begin()

    def on_forward(self, forward: Forward) -> AbstractContextManager[None] | None:
        self._begin()  # where the training loop does not announce steps
        return self._pass("forward", forward.chunk, forward.microbatch)

    def on_backward(self, backward: Microbatch) -> AbstractContextManager[None] | None:
        return self._pass("backward", *backward)

    def _pass(self, kind: str, chunk: int, microbatch: int) -> AbstractContextManager[None] | None:
        recording = self._recording
        if recording is None:
            return None
        number = "" if microbatch == UNNAMED else f" microbatch {microbatch}"
        return recording.spans.span(kind, f"{kind}{number}, chunk {chunk}")

    def on_step_end(self, step: Step) -> None:
        self._end(step.number)
        self._write_passed()
        self._next = step.number + 1
        self._begin()

    def _begin(self) -> None:
        if self._recording is not None or self._next not in self._steps:
            return
        with self._turn:
            if self._recording is not None or self._next not in self._steps:
                return  # another thread was here first
            recording = self._recording = _StepRecording(self._place, self._engine)
            if self._comm is not None:
                self._comm.meter.record(recording.spans)
            self._modules.spans = recording.spans
            for model in self._models:
                if (found := model()) is not None:
                    self._modules.watch(found, owner=self)

    def _end(self, number: int) -> None:
        """What is recorded was step `number`."""
        with self._turn:
            recording, self._recording = self._recording, None
            if recording is None:
                return
            self._modules.spans = None
            self._modules.close(self)
            if self._comm is not None:
                self._comm.meter.record(None)
            step, record = recording.end(number)
        if number in self._steps and (len(step.spans.found) > 1 or (record is not None and record.order)):
            self._ended.append((step, record))

    def _write_passed(self) -> None:
        """Write the file again if the device has passed the end of a step that is not in it."""
        passed = 0
        for _, record in self._ended:
            if record is not None and not record.passed():
                break
            passed += 1
        if passed <= self._written:
            return
        self._written = passed
        for step, record in self._ended[:passed]:
            if record is not None and not step.passes:
                step.passes = record.passes()
        text = trace_of([step for step, _ in self._ended[:passed]], self._place.rank, socket.gethostname())
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self._file) as stream:
                stream.write(text.encode())
        except OSError as error:
            logger.warning("report.trace: %s cannot be written (%s); training continues", self._file, error)

    def detach(self) -> None:
        self._end(self._next)  # training stops in the middle of it, or steps were never announced

    def close(self) -> None:
        self.detach()
        if len(self._ended) > self._written and self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)
        self._write_passed()

    def description(self) -> str:
        return f"trace of {len(self._steps)} steps: {self._file}"


class _StepRecording:
    """A step that is being recorded."""

    def __init__(self, place: Placement, engine: OffloadEngine | None) -> None:
        cuda = place.device.type == "cuda"
        self.spans = Spans(nvtx=cuda)
        self._engine = engine
        self._mark: Timestamp | None = None
        if cuda:  # at a point in time that both clocks know
            torch.cuda.synchronize(place.device)
        self._unix = time.time()
        self._began = self.spans.opened("step")
        if engine is not None:
            self._mark = engine.device.timestamp()
            engine.record_spans(self.spans)
            engine.recorder.request("trace", True)
            engine.meter.start_timeline()

    def end(self, number: int) -> tuple[TracedStep, StepRecord | None]:
        """Record no more."""
        self.spans.closed("step", f"step {number}", self._began)
        step = TracedStep(number, self.spans, self._began, self._unix, self._mark)
        if self._engine is None:
            return step, None
        self._engine.record_spans(None)
        meter, record = self._engine.meter, self._engine.recorder.take("trace")
        step.memory = [entry for entry in meter.timeline if entry[0] >= self._began]
        meter.stop_timeline()
        self._engine.recorder.request("trace", False)
        return step, record


DEVICE_TRACK = "saved tensors, as the device computes"
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
    """Forwards and backwards, on the clock of the device."""


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
        track = tracks.of("device", DEVICE_TRACK)
        whole = Span(
            track, one.kind, f"{one.kind}, chunk {one.chunk}", one.began + offset, one.ended + offset
        )
        yield _event(whole, start, rank, track)
        for name, began, ended in one.hooks:
            what = "save" if one.kind == "forward" else "use"
            yield _event(
                Span(track, what, f"{what} {name}", began + offset, ended + offset), start, rank, track
            )
