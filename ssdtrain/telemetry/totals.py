"""All metrics of a runtime, their differences over an interval, and their reduction over ranks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from ssdtrain.comm import CommMetrics
from ssdtrain.config import DIMENSIONS
from ssdtrain.metrics import Metric, MetricSet, Reduce, Unit, counter
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.storage import StoreMetrics


@dataclass
class StepMetrics(MetricSet):
    """Metrics of the run as a whole."""

    step_seconds: float = counter(Unit.SECONDS, "time", ranks=Reduce.MAX)
    """Time from the beginning of each step to its end; where the loop does not say when a step begins, from the end of the one
    before, and of the first step from its first forward."""


class RuntimeMetrics:
    """Metrics since the runtime was created. `print` shows a table: names are the metrics' own, with spaces for underscores, in
    the order of `declared`; counters have a total and a mean per step, gauges a value of the moment; zeros are left out.

    Args:
        steps: optimizer steps.
        run: metrics of the run as a whole.
        sets: metrics of features, each with the prefix of its names.

    Attributes:
        sets: prefixes of names and metrics, those of the run first.
        offload, store: metrics of offloading and its tiers; all 0 if offloading is disabled.
        comm: metrics of collectives by parallel dimension.
    """

    def __init__(self, steps: int, run: StepMetrics, sets: Iterable[tuple[str, MetricSet]]) -> None:
        self.steps = steps
        self._run = run
        self.step_seconds = run.step_seconds
        self.offload, self.store = OffloadMetrics(), StoreMetrics()
        self.comm: dict[str, CommMetrics] = {}
        self.sets = [("", run), *sets]
        for prefix, found in self.sets:
            if isinstance(found, OffloadMetrics):
                self.offload = found
            elif isinstance(found, StoreMetrics):
                self.store = found
            elif isinstance(found, CommMetrics):
                self.comm[prefix.removeprefix("comm/")] = found

    def declared(self) -> list[Metric]:
        """All metrics of this rank, in the order of output."""
        return [metric for prefix, found in self.sets for metric in found.declared(prefix)]

    def values(self) -> dict[str, float]:
        """Totals by name, without unknown values."""
        values: dict[str, float] = {}
        for prefix, found in self.sets:
            values.update(found.values(prefix))
        return values

    def with_all_dimensions(self) -> RuntimeMetrics:
        """These metrics with all parallel dimensions, so that all ranks have the same metrics in the same order."""
        every: list[tuple[str, MetricSet]] = [
            (f"comm/{dimension}", self.comm.get(dimension, CommMetrics())) for dimension in DIMENSIONS
        ]
        others = [(prefix, found) for prefix, found in self.sets[1:] if not isinstance(found, CommMetrics)]
        return RuntimeMetrics(self.steps, self._run, others + every)

    def __str__(self) -> str:
        values = self.values()
        total = f"in {self.steps} {'step' if self.steps == 1 else 'steps'}"
        heads = [total, "per step", "now"] if self.steps else ["total", "now"]
        table = Table("metric", *heads, box=box.SIMPLE_HEAD)
        for column in table.columns[1:]:
            column.justify = "right"
        for metric in self.declared():
            value = values.get(metric.name)
            if not value:
                continue
            name = metric.name.replace("_seconds", "_time").replace("_", " ").replace("ssd", "SSD")
            if not metric.cumulative:
                table.add_row(name, *[""] * (len(heads) - 1), metric.unit.text(value))
            elif self.steps:
                table.add_row(name, metric.unit.text(value), metric.unit.text(value / self.steps))
            else:
                table.add_row(name, metric.unit.text(value))
        stream = io.StringIO()
        Console(file=stream, width=100, no_color=True).print(table)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


class Interval:
    """Differences of metrics over an interval: the mean per step of cumulative metrics, the current value of others."""

    def __init__(self, begin: RuntimeMetrics | None = None) -> None:
        self._before = begin.values() if begin is not None else {}
        self._steps = begin.steps if begin is not None else 0

    def end(self, now: RuntimeMetrics) -> dict[str, float]:
        """End the interval: values by name since the previous `end`. Starts the next interval."""
        values, steps = now.values(), max(1, now.steps - self._steps)
        found = dict(values)
        for metric in now.declared():
            if metric.cumulative and metric.name in values:
                gained = values[metric.name] - self._before.get(metric.name, 0)
                found[metric.name] = gained if steps == 1 else gained / steps
        self._before, self._steps = values, now.steps
        return found


def reduce_over_ranks(
    metrics: list[Metric], values: Mapping[str, float], device: torch.device
) -> dict[str, float]:
    """Reduce metrics over ranks as declared. Without torch.distributed, returns the values of this process.

    A collective of two small all_reduces: all ranks must call it with the same metrics.

    Args:
        metrics: the same on all ranks, see `RuntimeMetrics.with_all_dimensions`.
        values: of this rank by name, without unknown ones.
        device: for collectives of the default group.
    """
    added = [metric for metric in metrics if metric.ranks is Reduce.SUM]
    compared = [metric for metric in metrics if metric.ranks is not Reduce.SUM]
    signs = {metric.name: -1.0 if metric.ranks is Reduce.MIN else 1.0 for metric in compared}
    unknown = float("-inf")
    sums = torch.tensor([values.get(metric.name, 0.0) for metric in added], dtype=torch.float64, device="cpu")
    mosts = torch.tensor(
        [sign * values[name] if name in values else unknown for name, sign in signs.items()],
        dtype=torch.float64,
        device="cpu",
    )
    if dist.is_available() and dist.is_initialized():
        sums, mosts = sums.to(device), mosts.to(device)
        dist.all_reduce(sums)
        dist.all_reduce(mosts, op=dist.ReduceOp.MAX)
    found = dict(zip([metric.name for metric in added], sums.tolist(), strict=True))
    for (name, sign), most in zip(signs.items(), mosts.tolist(), strict=True):
        if most != unknown:
            found[name] = sign * most
    return found
