"""Declaration of metrics: once, as a field of the dataclass that counts them.

```python
@dataclass
class CacheMetrics(MetricSet):
    hits: int = counter(Unit.COUNT, "cache hits")
    resident_bytes: int = gauge(Unit.BYTES, ranks=Reduce.MAX)
```

The declaration is sufficient for the metric to appear in the JSON lines, the log lines of every framework, their monitors
(TensorBoard, wandb, csv) and the table of `print(runtime.statistics())`: none of them lists metrics by name.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, cast

from ssdtrain.text import duration_text, size_text


class Unit(Enum):
    BYTES = "bytes"
    SECONDS = "seconds"
    COUNT = "count"

    def text(self, value: float) -> str:
        """Format `value`: "1.20 GiB", "3.44 ms", "12", or "0.5" for a mean of counts."""
        if self is Unit.BYTES:
            return size_text(value)
        return duration_text(value) if self is Unit.SECONDS else f"{value:.6g}"


class Reduce(Enum):
    """Reduction of a metric over ranks."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Metric:
    """Description of a metric."""

    name: str
    """Key in JSON lines, including the prefix of its set: "offloaded_bytes", "comm/dp/wire_bytes"."""
    unit: Unit
    cumulative: bool
    """True: a total since the start, reported as the difference over a step or interval. False: the current value."""
    ranks: Reduce
    label: str
    """Label in log lines; "": not shown in log lines."""

    def under(self, prefix: str) -> Metric:
        """This metric in a set with a prefix, such as "comm/dp"."""
        if not prefix:
            return self
        label = f"{prefix.rpartition('/')[2]} {self.label}" if self.label else ""
        return replace(self, name=f"{prefix}/{self.name}", label=label)


def counter(unit: Unit, label: str = "", *, ranks: Reduce = Reduce.SUM) -> Any:
    """A dataclass field for a cumulative metric that starts at 0.

    Args:
        unit: of the value.
        label: in log lines, without unit; "": not shown. Log lines show the mean per step, and omit zeros.
        ranks: reduction over ranks, for example the sum of bytes, or the maximum of seconds waited.
    """
    return _metric(unit, label, ranks, cumulative=True)


def gauge(unit: Unit, label: str = "", *, ranks: Reduce = Reduce.MAX, unknown: bool = False) -> Any:
    """A dataclass field for a current value, or a maximum since the last reset.

    Args:
        unit, label, ranks: as in `counter`.
        unknown: the initial value is None, which is not reported.
    """
    return _metric(unit, label, ranks, cumulative=False, default=None if unknown else 0)


def _metric(unit: Unit, label: str, ranks: Reduce, *, cumulative: bool, default: float | None = 0) -> Any:
    if unit is Unit.SECONDS and default is not None:
        default = 0.0
    return field(default=default, metadata={"metric": Metric("", unit, cumulative, ranks, label)})


class MetricSet:
    """Base of dataclasses whose fields are metrics. Fields declared without `counter` or `gauge` are not metrics."""

    @classmethod
    def declared(cls, prefix: str = "") -> tuple[Metric, ...]:
        """The metrics of this set in order of declaration, with `prefix`."""
        return _declared(cast(Hashable, cls), prefix)

    def values(self, prefix: str = "") -> dict[str, float]:
        """Values by name, without unknown ones."""
        pairs = zip(self.declared(prefix), self.declared(), strict=True)
        found = ((named.name, getattr(self, own.name)) for named, own in pairs)
        return {name: value for name, value in found if value is not None}


@functools.cache
def _declared(cls: Any, prefix: str) -> tuple[Metric, ...]:
    found = ((f.name, f.metadata["metric"]) for f in fields(cls) if "metric" in f.metadata)
    return tuple(replace(metric, name=name).under(prefix) for name, metric in found)


def shown(metrics: Iterable[Metric], values: Mapping[str, float]) -> list[Metric]:
    """Metrics with a label and a nonzero value."""
    return [metric for metric in metrics if metric.label and values.get(metric.name)]


def line(metrics: Iterable[Metric], values: Mapping[str, float]) -> str:
    """Format a log line: "offloaded/step: 4.08 MiB | activation peak without SSDTrain: 34.6 MiB".

    Args:
        metrics: in order of output.
        values: counters as means per step.
    """
    return " | ".join(
        f"{metric.label}{'/step' if metric.cumulative else ''}: {metric.unit.text(values[metric.name])}"
        for metric in shown(metrics, values)
    )
