"""Metrics of each dimension: bytes with and without compression, times, and reasons of uncompressed calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ssdtrain.metrics import MetricSet, Reduce, Unit, counter
from ssdtrain.profile.time_spans import Spans


@dataclass
class CommMetrics(MetricSet):
    """One dimension's traffic, on this rank, since the start."""

    calls: int = counter(Unit.COUNT)
    """Collectives and sends, compressed or not."""
    wire_bytes: int = counter(Unit.BYTES, "sent")
    """What was sent from this rank, fallbacks included; protocol headers below the tensors are not."""
    raw_bytes: int = counter(Unit.BYTES, "without compression")
    """What the framework's own algorithm sends from this rank, in the dtype that it sends: for a ring of N ranks and S bytes
    2(N-1)/N S for an all-reduce and (N-1)/N S for each half of one."""
    codec_seconds: float = counter(Unit.SECONDS, "codec time", ranks=Reduce.MAX)
    """Encoding, decoding and summing, on the host; on a GPU `device_seconds` holds all."""
    wait_seconds: float = counter(Unit.SECONDS, "waited", ranks=Reduce.MAX)
    """Time waited for messages under way."""
    device_seconds: float = counter(Unit.SECONDS, ranks=Reduce.MAX)
    """Time from start to end of compressed calls on the communication stream."""
    compressed: int = counter(Unit.COUNT)
    """Calls that were compressed."""
    overflows: int = counter(Unit.COUNT)
    """Sections of exact payloads sent from this rank that did not fit, whose elements went uncompressed."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Reason -> calls that went uncompressed."""
    dimension: str = field(default="", compare=False)
    spans: Spans | None = field(default=None, repr=False, compare=False)
    """Trace that gets each interval; None: none is recorded."""

    def count_codec(self, began: float) -> None:
        """Count encoding or decoding from `began` (`time.perf_counter`) until now."""
        self.codec_seconds += self._since(began, "codec")

    def count_wait(self, began: float) -> None:
        """Count the wait for a message from `began` until now."""
        self.wait_seconds += self._since(began, "collective")

    def _since(self, began: float, kind: str) -> float:
        ended = time.perf_counter()
        if (spans := self.spans) is not None:
            spans.add(kind, self.dimension, began, ended)
        return ended - began

    @property
    def ratio(self) -> float:
        """Wire bytes per raw byte; 1 before anything was sent."""
        return self.wire_bytes / self.raw_bytes if self.raw_bytes else 1.0


class Meter:
    """Metrics by dimension. One thread writes: the one that issues collectives. Any may take a `snapshot`."""

    def __init__(self) -> None:
        self._metrics: dict[str, CommMetrics] = {}
        self._spans: Spans | None = None
        self._pending: list[tuple[CommMetrics, Callable[[], float | None]]] = []

    def of(self, dimension: str) -> CommMetrics:
        if dimension not in self._metrics:
            self._metrics[dimension] = CommMetrics(dimension=dimension, spans=self._spans)
        return self._metrics[dimension]

    def record(self, spans: Spans | None) -> None:
        """Add the intervals of all dimensions to `spans` too; None: no more."""
        self._spans = spans
        for metrics in self._metrics.values():
            metrics.spans = spans

    def count_compressed(self, dimension: str, raw_bytes: int) -> CommMetrics:
        """Count a compressed call; returns the metrics that its wire bytes and times are added to."""
        metrics = self.of(dimension)
        metrics.calls += 1
        metrics.compressed += 1
        metrics.raw_bytes += raw_bytes
        return metrics

    def count_fallback(self, dimension: str, reason: str, raw_bytes: int) -> bool:
        """Count an uncompressed call; True the first time that this dimension gives this reason."""
        metrics = self.of(dimension)
        metrics.calls += 1
        metrics.raw_bytes += raw_bytes
        metrics.wire_bytes += raw_bytes
        metrics.fallbacks[reason] += 1
        return metrics.fallbacks[reason] == 1

    def add_device_seconds(self, metrics: CommMetrics, seconds: Callable[[], float | None]) -> None:
        """Add device seconds as soon as `seconds` returns them: None while the device has not got there."""
        self._pending.append((metrics, seconds))
        if len(self._pending) > 256:
            self._read()

    def snapshot(self) -> dict[str, CommMetrics]:
        """Return copies, by dimension."""
        self._read()
        metrics = list(self._metrics.items())
        return {name: replace(each, fallbacks=Counter(each.fallbacks)) for name, each in metrics}

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        for metrics, seconds in pending:
            elapsed = seconds()
            if elapsed is None:
                self._pending.append((metrics, seconds))
            else:
                metrics.device_seconds += elapsed
