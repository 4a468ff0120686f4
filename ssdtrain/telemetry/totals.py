"""All metrics of a runtime in one object, and what they gained since an earlier look."""

from __future__ import annotations

import io
from collections.abc import Mapping
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
from ssdtrain.telemetry.registry import Metric, MetricSet, Over, Unit, counter, gauge

__all__ = ["Interval", "RuntimeMetrics", "StepMetrics"]


@dataclass
class StepMetrics(MetricSet):
    """Of the run as a whole."""

    step_seconds: float = counter(Unit.SECONDS, "time", ranks=Over.MAX)
    """From the end of one optimizer step to the end of the next."""
    ssd_life_seconds: float | None = gauge(Unit.SECONDS, "projected SSD life", ranks=Over.MIN, unknown=True)
    """Until the first drive has reached its rating (one drive write a day for five years, less its present wear), if the run goes
    on as it did. See `ssdtrain.storage.Endurance`."""


class RuntimeMetrics:
    """What happened since the runtime was made. `print` shows it as a table.

    Args:
        steps: optimizer steps.
        run: of the run as a whole.
        offload, store: of the engine and the tiers; None: not enabled, and the attributes are all 0.
        comm: of the collectives, by parallel dimension.
        more: sets of other features, by the prefix of their metrics' names.
    """

    def __init__(
        self,
        steps: int,
        run: StepMetrics,
        offload: OffloadMetrics | None,
        store: StoreMetrics | None,
        comm: Mapping[str, CommMetrics],
        more: Mapping[str, MetricSet] | None = None,
    ) -> None:
        self.steps = steps
        self.offload = offload if offload is not None else OffloadMetrics()
        self.store = store if store is not None else StoreMetrics()
        self.comm = dict(comm)
        self._sets: list[tuple[str, MetricSet]] = []
        if offload is not None:
            self._sets.append(("", offload))
        if store is not None:
            self._sets.append(("", store))
        self._sets += [(f"comm/{dimension}", found) for dimension, found in comm.items()]
        self._sets += [*(more or {}).items(), ("", run)]
        self.step_seconds = run.step_seconds

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
        found = RuntimeMetrics(self.steps, StepMetrics(), None, None, {})
        comm = {dimension: self.comm.get(dimension, CommMetrics()) for dimension in DIMENSIONS}
        found._sets = [(f"comm/{dimension}", metrics) for dimension, metrics in comm.items()]
        found._sets += [pair for pair in self._sets if not pair[0].startswith("comm/")]
        return found

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
