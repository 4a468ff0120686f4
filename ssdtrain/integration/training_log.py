"""Metrics of a runtime in the log of a trainer, by the method that writes it: a callback sees a log only after it is in the
trainer's history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ssdtrain.integration.patching import Wrap
from ssdtrain.metrics import shown
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.totals import Interval

_PREFIX = "ssdtrain"
_VALUES = ("loss", "grad_norm")
"""Values of the trainer's log that are in the journal too, by which two runs are compared."""


def metrics_since(interval: Interval, runtime: Runtime) -> dict[str, float]:
    """Return what log lines show, bytes and seconds per step since the last call, by name; {} where nothing is enabled."""
    now = runtime.statistics()
    if now is None:
        return {}
    values = interval.end(now)
    return {f"{_PREFIX}/{metric.name}": values[metric.name] for metric in shown(now.declared(), values)}


def adds_metrics(
    interval: Interval,
    runtime_of: Callable[[Any], Runtime | None],
    end_step: Callable[[], object] | None = None,
) -> Wrap:
    """Make the wrapper of a trainer's `log(self, logs, ...)`, which adds metrics to logs that have a loss.

    Args:
        interval: begins with the runtime.
        runtime_of: returns the runtime whose metrics belong in the log of a trainer; None: there is none.
        end_step: ends the step that is logged, whose line of the journal has its loss then; None: it is over already.
    """

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            runtime = runtime_of(self) if "loss" in logs else None
            if runtime is not None:
                values = {name: logs[name] for name in _VALUES if name in logs}
                if end_step is None:
                    runtime.log_late_values(**values)
                else:
                    runtime.log_values(**values)
                    end_step()
                logs = logs | metrics_since(interval, runtime)
            return plain(self, logs, *args, **kwargs)

        return log

    return wrap
