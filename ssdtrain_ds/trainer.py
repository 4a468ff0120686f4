"""Metrics in the log of Hugging Face's Trainer: its console line, its history, and whatever it reports to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.registry import shown
from ssdtrain.telemetry.totals import Interval
from ssdtrain_ds import _compat

__all__ = ["follow"]

PREFIX = "ssdtrain"

_runtimes: dict[int, tuple[Any, Runtime, Interval]] = {}
"""By the id of their engine: those whose metrics a Trainer logs."""

_PLAIN = "_ssdtrain_plain_log"


def follow(engine: Any, runtime: Runtime) -> Callable[[], None]:
    """Add the metrics of `runtime` to the training logs of the Trainer that drives `engine`, if there is one.

    A log gets what log lines show: bytes and seconds per step since the log before, of this process's rank. It is the method
    `Trainer.log` that adds them, because a callback sees a log only after it is in the Trainer's history; it is the Trainer's own
    again when no engine with an active block is left.

    Returns:
        What undoes it.
    """
    trainer = _compat.trainer_class()
    if trainer is None:
        return lambda: None
    if not hasattr(trainer.log, _PLAIN):
        trainer.log = _logging(trainer.log)
    _runtimes[id(engine)] = (engine, runtime, Interval(runtime.statistics()))

    def undo() -> None:
        _runtimes.pop(id(engine), None)
        plain = getattr(trainer.log, _PLAIN, None)
        if not _runtimes and plain is not None:
            trainer.log = plain

    return undo


def _logging(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        engine, runtime, interval = _runtimes.get(id(self.model_wrapped), (None, None, None))
        if engine is self.model_wrapped and runtime is not None and interval is not None and "loss" in logs:
            now = runtime.statistics()
            if now is not None:
                values = interval.end(now)
                logs = logs | {f"{PREFIX}/{m.name}": values[m.name] for m in shown(now.declared(), values)}
        return plain(self, logs, *args, **kwargs)

    setattr(log, _PLAIN, plain)
    return log
