"""How a metric is declared: once, as a field of the dataclass that counts it.

```python
@dataclass
class CacheMetrics(MetricSet):
    hits: int = counter(Unit.COUNT, "cache hits")
    resident_bytes: int = gauge(Unit.BYTES, ranks=Over.MAX)
```

From the declaration alone the metric reaches the JSON lines, the log lines of every framework, their monitors (TensorBoard,
wandb, csv) and the table that `print(runtime.statistics())` prints: none of them lists metrics by name.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, cast

from ssdtrain.telemetry.text import duration_text, size_text

__all__ = ["Metric", "MetricSet", "Over", "Unit", "counter", "gauge", "line", "shown"]


class Unit(Enum):
    BYTES = "bytes"
    SECONDS = "seconds"
    COUNT = "count"

    def text(self, value: float) -> str:
        """`value` as people read it: "1.20 GiB", "3.44 ms", "12", and "0.5" for a mean of counts."""
        if self is Unit.BYTES:
            return size_text(value)
        return duration_text(value) if self is Unit.SECONDS else f"{value:.6g}"


class Over(Enum):
    """How the values of ranks become one."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Metric:
    """What is known about a metric besides its value."""

    name: str
    """Key in JSON lines, after the prefix of its set: "offloaded_bytes", "comm/dp/wire_bytes"."""
    unit: Unit
    counts: bool
    """True: a total since the start, of which a step or an interval has the difference. False: a value of this moment."""
    ranks: Over
    label: str
    """In log lines; "" is not shown there."""

    def under(self, prefix: str) -> Metric:
        """The same metric of a set that is one of several, such as "comm/dp"."""
        if not prefix:
            return self
        label = f"{prefix.rpartition('/')[2]} {self.label}" if self.label else ""
        return replace(self, name=f"{prefix}/{self.name}", label=label)


def counter(unit: Unit, label: str = "", *, ranks: Over = Over.SUM) -> Any:
    """A dataclass field that only grows, from 0.

    Args:
        unit: of the value.
        label: how log lines call it, without unit; "": log lines leave it out. A log line shows the mean per step, and leaves
            out what is 0.
        ranks: how the values of ranks are combined where one process writes for all: bytes are added; of seconds of waiting the
            rank that waited longest is the one that counts.
    """
    return _metric(unit, label, ranks, counts=True)


def gauge(unit: Unit, label: str = "", *, ranks: Over = Over.MAX, unknown: bool = False) -> Any:
    """A dataclass field that holds a value of this moment, or the highest since the last reset.

    Args:
        unit, label, ranks: as of `counter`.
        unknown: None until it is known. An unknown value is written nowhere.
    """
    return _metric(unit, label, ranks, counts=False, default=None if unknown else 0)


def _metric(unit: Unit, label: str, ranks: Over, *, counts: bool, default: float | None = 0) -> Any:
    if unit is Unit.SECONDS and default is not None:
        default = 0.0
    return field(default=default, metadata={"metric": Metric("", unit, counts, ranks, label)})


class MetricSet:
    """Base of dataclasses whose fields are metrics. Fields that are declared otherwise are the owner's own."""

    @classmethod
    def declared(cls, prefix: str = "") -> tuple[Metric, ...]:
        """The metrics of this set, in the order of their declaration, as they are called below `prefix`."""
        return _declared(cast(Hashable, cls), prefix)

    def values(self, prefix: str = "") -> dict[str, float]:
        """By name; what is not known yet is left out."""
        pairs = zip(self.declared(prefix), self.declared(), strict=True)
        found = ((named.name, getattr(self, own.name)) for named, own in pairs)
        return {name: value for name, value in found if value is not None}


@functools.cache
def _declared(cls: Any, prefix: str) -> tuple[Metric, ...]:
    found = ((f.name, f.metadata["metric"]) for f in fields(cls) if "metric" in f.metadata)
    return tuple(replace(metric, name=name).under(prefix) for name, metric in found)


def shown(metrics: Iterable[Metric], values: Mapping[str, float]) -> list[Metric]:
    """Those of `metrics` that have a label and are not 0."""
    return [metric for metric in metrics if metric.label and values.get(metric.name)]


def line(metrics: Iterable[Metric], values: Mapping[str, float]) -> str:
    """A log line of the shown metrics: "offloaded/step: 4.08 MiB | activation peak without SSDTrain: 34.6 MiB".

    Args:
        metrics: those to choose from, in order.
        values: counters as means per step.
    """
    return " | ".join(
        f"{metric.label}{'/step' if metric.counts else ''}: {metric.unit.text(values[metric.name])}"
        for metric in shown(metrics, values)
    )
