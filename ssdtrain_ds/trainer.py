"""Metrics in the log of Hugging Face's Trainer: its console line, its history, and whatever it reports to."""

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

__all__ = ["patch_trainer"]

PREFIX = "ssdtrain"


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
            logs = logs | {f"{PREFIX}/{m.name}": values[m.name] for m in shown(now.declared(), values)}
        return plain(self, logs, *args, **kwargs)

    return log
