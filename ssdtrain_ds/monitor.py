"""Metrics in DeepSpeed's monitor (TensorBoard, csv, Weights & Biases, Comet), and in the log of Hugging Face's Trainer: its
console line, its history, and whatever it reports to."""

from __future__ import annotations

import weakref
from typing import Any

from ssdtrain.integration.patching import Patches
from ssdtrain.integration.training_log import adds_metrics
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.totals import Interval
from ssdtrain_ds import _compat

_IN_MONITOR = "Train/SSDTrain"


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
            events = [
                (f"{_IN_MONITOR}/{name}", value, samples) for name, value in self._interval.end(now).items()
            ]
            engine.monitor.write_events(events)


def patch_trainer(patches: Patches, engine: Any, runtime: Runtime) -> None:
    """Add the metrics of `runtime` to the training logs of the Trainer that drives `engine`, if there is one.

    A log gets what log lines show: bytes and seconds per step since the log before, of this process's rank.
    """
    trainer = _compat.trainer_class()
    if trainer is None:
        return
    # Weak references: the class outlives engines, and nobody destroys those of a Trainer.
    driven, known = weakref.ref(engine), weakref.ref(runtime)

    def runtime_of(self: Any) -> Runtime | None:
        return known() if self.model_wrapped is driven() else None

    patches.replace(trainer, "log", adds_metrics(Interval(runtime.statistics()), runtime_of))
