"""The metrics of all ranks since the last time they were gathered, for log lines, TensorBoard and wandb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdtrain.metrics import Metric, line
from ssdtrain.telemetry.totals import Interval, reduce_over_ranks

if TYPE_CHECKING:
    from ssdtrain_megatron.attachment import Attachment

__all__ = ["GatheredMetrics"]


class GatheredMetrics:
    """Per step and over all ranks: bytes are sums, seconds and peaks are those of the rank that has most.

    Args:
        attachment: enabled; every rank has one, and every rank calls `gather` at the same step.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._runtime = attachment.runtime
        self._interval = Interval()
        self._metrics: list[Metric] = []
        self._found: dict[str, float] = {}

    def gather(self) -> None:
        """Take the metrics since the last call. A collective over all ranks: two small all_reduces."""
        statistics = self._runtime.statistics()
        assert statistics is not None
        now = statistics.with_all_dimensions() if self._runtime.comm is not None else statistics
        self._metrics = now.declared()
        self._found = reduce_over_ranks(self._metrics, self._interval.end(now), self._runtime.device)
        self._runtime.reset_peak()

    def scalars(self) -> dict[str, float]:
        """Return values by name; of the parallel dimensions those that sent anything."""
        silent = {
            name.rpartition("/")[0]
            for name, value in self._found.items()
            if name.endswith("/calls") and not value
        }
        return {name: value for name, value in self._found.items() if name.rpartition("/")[0] not in silent}

    def line(self) -> str:
        """One line for people."""
        return line(self._metrics, self._found)
