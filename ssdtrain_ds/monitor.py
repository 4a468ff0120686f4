"""Metrics in DeepSpeed's monitor (TensorBoard, csv, Weights & Biases, Comet)."""

from __future__ import annotations

from typing import Any

from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.totals import Interval

__all__ = ["Monitor"]

PREFIX = "Train/SSDTrain"


class Monitor:
    """Writes the metrics of rank 0 after each step, against the samples seen, as DeepSpeed's own values are.

    The log lines are the runtime's, every `report.interval` steps: DeepSpeed's logger is at WARNING by default, and
    `steps_per_print` is infinite under accelerate.
    """

    def __init__(self, engine: Any, runtime: Runtime) -> None:
        self._engine = engine
        self._runtime = runtime
        self._interval = Interval(runtime.statistics())

    def step(self) -> None:
        """A step is over."""
        engine = self._engine
        if engine.global_rank != 0 or not engine.monitor.enabled:
            return
        now = self._runtime.statistics()
        if now is not None:
            samples = engine.global_samples
            events = [(f"{PREFIX}/{name}", value, samples) for name, value in self._interval.end(now).items()]
            engine.monitor.write_events(events)
