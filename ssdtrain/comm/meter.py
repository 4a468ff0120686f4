"""How many bytes each dimension would have sent, how many it sent, and why some went uncompressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ssdtrain.telemetry.registry import MetricSet, Over, Unit, counter


@dataclass
class CommMetrics(MetricSet):
    """One dimension's traffic, on this rank, since the start."""

    calls: int = counter(Unit.COUNT)
    wire_bytes: int = counter(Unit.BYTES, "sent")
    """What was sent from this rank, fallbacks included; protocol headers below the tensors are not."""
    raw_bytes: int = counter(Unit.BYTES, "without compression")
    """What the framework's own algorithm sends from this rank, in the dtype that it sends: for a ring of N ranks and S bytes
    2(N-1)/N S for an all-reduce and (N-1)/N S for each half of one."""
    codec_seconds: float = counter(Unit.SECONDS, "codec", ranks=Over.MAX)
    """Encoding, decoding and summing, on the host; on a GPU `device_seconds` holds all."""
    wait_seconds: float = counter(Unit.SECONDS, "waited", ranks=Over.MAX)
    """Waiting for messages that were under way."""
    device_seconds: float = counter(Unit.SECONDS, ranks=Over.MAX)
    """From the start to the end of compressed calls on the communication stream."""
    compressed: int = counter(Unit.COUNT)
    """Calls that were compressed."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Reason -> calls that went uncompressed."""

    @property
    def ratio(self) -> float:
        """Wire bytes per raw byte; 1 before anything was sent."""
        return self.wire_bytes / self.raw_bytes if self.raw_bytes else 1.0


class Meter:
    """Metrics by dimension. One thread writes: the one that issues collectives."""

    def __init__(self) -> None:
        self._figures: dict[str, CommMetrics] = {}
        self._unread: list[tuple[CommMetrics, Callable[[], float | None]]] = []

    def of(self, dimension: str) -> CommMetrics:
        return self._figures.setdefault(dimension, CommMetrics())

    def fell_back(self, dimension: str, reason: str, raw_bytes: int) -> bool:
        """Count an uncompressed call; True the first time that this dimension gives this reason."""
        figures = self.of(dimension)
        figures.calls += 1
        figures.raw_bytes += raw_bytes
        figures.wire_bytes += raw_bytes
        figures.fallbacks[reason] += 1
        return figures.fallbacks[reason] == 1

    def later(self, figures: CommMetrics, seconds: Callable[[], float | None]) -> None:
        """Device seconds that are known once the device is there; None: not yet."""
        self._unread.append((figures, seconds))
        if len(self._unread) > 256:
            self._read()

    def snapshot(self) -> dict[str, CommMetrics]:
        """Copies, by dimension."""
        self._read()
        return {
            name: replace(found, fallbacks=Counter(found.fallbacks)) for name, found in self._figures.items()
        }

    def _read(self) -> None:
        waiting = []
        for figures, seconds in self._unread:
            found = seconds()
            if found is None:
                waiting.append((figures, seconds))
            else:
                figures.device_seconds += found
        self._unread = waiting
