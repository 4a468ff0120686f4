"""All metrics of a runtime in one object, and what they gained since an earlier look."""

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
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.storage import StoreMetrics
from ssdtrain.telemetry.registry import Metric, MetricSet, Over, Unit, counter

__all__ = ["Interval", "RuntimeMetrics", "StepMetrics"]


@dataclass
class StepMetrics(MetricSet):
    """Of the run as a whole."""

    step_seconds: float = counter(Unit.SECONDS, "time", ranks=Over.MAX)
    """From the end of one optimizer step to the end of the next."""


class RuntimeMetrics:
    """What happened since the runtime was made. `print` shows it as a table.

    Args:
        steps: optimizer steps.
        run: of the run as a whole.
        sets: of the features, each with the prefix of its metrics' names.

    Attributes:
        offload, store: of the offload engine and its tiers; all 0 where offloading is not enabled.
        comm: of the collectives, by parallel dimension.
    """

    def __init__(self, steps: int, run: StepMetrics, sets: Iterable[tuple[str, MetricSet]]) -> None:
        self.steps = steps
        self._run = run
        self.step_seconds = run.step_seconds
        self.offload, self.store = OffloadMetrics(), StoreMetrics()
        self.comm: dict[str, CommMetrics] = {}
        self._sets = [*sets, ("", run)]
        for prefix, found in self._sets:
            if isinstance(found, OffloadMetrics):
                self.offload = found
            elif isinstance(found, StoreMetrics):
                self.store = found
            elif isinstance(found, CommMetrics):
                self.comm[prefix.removeprefix("comm/")] = found

    def declared(self) -> list[Metric]:
        """Every metric that this rank has, in the order in which it is shown."""
        return [metric for prefix, found in self._sets for metric in found.declared(prefix)]

    def values(self) -> dict[str, float]:
        """By name, since the start; what is not known yet is left out."""
        values: dict[str, float] = {}
        for prefix, found in self._sets:
            values.update(found.values(prefix))
        return values

    def with_all_dimensions(self) -> RuntimeMetrics:
        """The same with every parallel dimension, so that all ranks have the same metrics in the same order."""
        every: list[tuple[str, MetricSet]] = [
            (f"comm/{dimension}", self.comm.get(dimension, CommMetrics())) for dimension in DIMENSIONS
        ]
        others = [(prefix, found) for prefix, found in self._sets[:-1] if not isinstance(found, CommMetrics)]
        return RuntimeMetrics(self.steps, self._run, every + others)

    def __str__(self) -> str:
        values = self.values()
        steps = "step" if self.steps == 1 else "steps"
        total = f"in {self.steps} {steps}" if self.steps else "total"
        table = Table("metric", total, "per step", box=box.SIMPLE_HEAD, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for metric in self.declared():
            value = values.get(metric.name)
            if not value:
                continue
            name = metric.name.replace("_seconds", "_time").replace("_", " ")
            mean = metric.unit.text(value / self.steps) if metric.counts and self.steps else ""
            table.add_row(name, metric.unit.text(value), mean)
        stream = io.StringIO()
        Console(file=stream, width=100, no_color=True).print(table)
        return "\n".join(line.rstrip() for line in stream.getvalue().strip("\n").splitlines())


class Interval:
    """What metrics gained since the last time that it ended: of counters the mean per step, of gauges the value now."""

    def __init__(self, begin: RuntimeMetrics | None = None) -> None:
        self._before = begin.values() if begin is not None else {}
        self._steps = begin.steps if begin is not None else 0

    def end(self, now: RuntimeMetrics) -> dict[str, float]:
        """Per step, by name, from the last end (or from the beginning) until `now`. The next interval begins."""
        values, steps = now.values(), max(1, now.steps - self._steps)
        found = dict(values)
        for metric in now.declared():
            if metric.counts and metric.name in values:
                gained = values[metric.name] - self._before.get(metric.name, 0)
                found[metric.name] = gained if steps == 1 else gained / steps
        self._before, self._steps = values, now.steps
        return found


def over_ranks(metrics: list[Metric], values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """The values of all ranks in one, each metric combined as it is declared. Without torch.distributed those of this process.

    A collective over all ranks, two small all_reduces: every rank calls it with the same metrics.

    Args:
        metrics: the same on all ranks, see `RuntimeMetrics.with_all_dimensions`.
        values: of this rank, by name; what is missing is not known on this rank.
        device: that collectives of the default group work on.
    """
    added = [metric for metric in metrics if metric.ranks is Over.SUM]
    compared = [metric for metric in metrics if metric.ranks is not Over.SUM]
    signs = {metric.name: -1.0 if metric.ranks is Over.MIN else 1.0 for metric in compared}
    unknown = float("-inf")
    sums = torch.tensor([values.get(metric.name, 0.0) for metric in added], dtype=torch.float64)
    mosts = torch.tensor(
        [sign * values[name] if name in values else unknown for name, sign in signs.items()],
        dtype=torch.float64,
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
