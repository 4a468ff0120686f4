"""Lightning: a callback of `lightning.Trainer`.

```python
from ssdtrain.lightning import SSDTrainLightningCallback

trainer = lightning.Trainer(callbacks=[SSDTrainLightningCallback({"offload": {"directories": "./spill"}})])
trainer.fit(module, loader)
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning

from ssdtrain.config import Config
from ssdtrain.integration.training_log import metrics_since
from ssdtrain.pytorch.api import attach
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.totals import Interval

__all__ = ["SSDTrainLightningCallback"]


class SSDTrainLightningCallback(lightning.Callback):  # type: ignore[misc]
    """Attaches to the module while it is fitted. Metrics are logged as `ssdtrain/*` every `trainer.log_every_n_steps`; at the end
    the runtime closes and says what it brought, also after an exception.

    Args:
        config: as `ssdtrain.attach` takes it.
        options: more arguments of `ssdtrain.attach`.

    Attributes:
        runtime: the runtime of the fit that runs or ran last; None before.

    Raises:
        ConfigError: when training begins, see `ssdtrain.attach`.
    """

    def __init__(self, config: Config | Mapping[str, Any] | str | Path, **options: Any) -> None:
        self.config, self.options = config, options
        self.runtime: Runtime | None = None
        self._interval = Interval()
        # The step up to which metrics are logged: batches that are accumulated have the same one.
        self._logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to what the strategy calls."""
        self.runtime = attach(trainer.strategy.model or pl_module, self.config, **self.options)
        self._interval, self._logged = Interval(self.runtime.statistics()), trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log what log lines show, per step since the log before."""
        step = trainer.global_step
        if self.runtime is None or step == self._logged or step % trainer.log_every_n_steps:
            return
        self._logged, values = step, metrics_since(self._interval, self.runtime)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def on_train_end(self, *_: Any) -> None:
        """Close the runtime."""
        self._close()

    def on_exception(self, *_: Any) -> None:
        """Close the runtime."""
        self._close()

    def _close(self) -> None:
        if self.runtime is not None:
            self.runtime.close()
