"""Metrics in DeepSpeed's monitor (TensorBoard, csv, Weights & Biases, Comet), and in the log of Hugging Face's Trainer: its
console line, its history, and whatever it reports to."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ssdtrain.integration.patching import Patches
from ssdtrain.metrics import shown
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.totals import Interval
from ssdtrain_ds import _compat

__all__ = ["Monitor", "patch_trainer"]

_IN_MONITOR = "Train/SSDTrain"
_IN_TRAINER = "ssdtrain"


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

    A log gets what log lines show: bytes and seconds per step since the log before, of this process's rank. It is the method
    `Trainer.log` that adds them, because a callback sees a log only after it is in the Trainer's history.
    """
    trainer = _compat.trainer_class()
    if trainer is not None:
        interval = Interval(runtime.statistics())
        # Weak references: the class outlives engines, and nobody destroys those of a Trainer.
        found = weakref.ref(engine), weakref.ref(runtime)
        patches.replace(trainer, "log", functools.partial(_logging, *found, interval))


def _logging(
    engine: weakref.ref[Any], runtime: weakref.ref[Runtime], interval: Interval, plain: Callable[..., Any]
) -> Callable[..., Any]:
    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        owner = runtime() if self.model_wrapped is engine() and "loss" in logs else None
        now = owner.statistics() if owner is not None else None
        if now is not None:
            values = interval.end(now)
            logs = logs | {f"{_IN_TRAINER}/{m.name}": values[m.name] for m in shown(now.declared(), values)}
        return plain(self, logs, *args, **kwargs)

    return log
