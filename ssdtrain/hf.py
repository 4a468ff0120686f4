"""Hugging Face: a callback for Trainer and TRL's trainers, and a plugin for loops of accelerate.

```python
from ssdtrain.hf import SSDTrainCallback

trainer = SFTTrainer(model, args=args, train_dataset=rows, callbacks=[SSDTrainCallback({"offload": {"directories": "./spill"}})])
trainer.train()
```

Both call `ssdtrain.attach`, and hold nothing else. Under DeepSpeed the same config is the block "ssdtrain" of DeepSpeed's.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import TrainerCallback

from ssdtrain.config import Config
from ssdtrain.integration.patching import Patches
from ssdtrain.integration.training_log import adds_metrics, metrics_since
from ssdtrain.pytorch.api import attach
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.totals import Interval

__all__ = ["SSDTrainCallback", "SSDTrainPlugin"]


class SSDTrainCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches to the model of a trainer while it trains. Metrics are in the trainer's log as `ssdtrain/*`, and so in all that it
    reports to; at the end of training the runtime closes and says what it brought.

    Args:
        config: as `ssdtrain.attach` takes it.
        options: more arguments of `ssdtrain.attach`.

    Attributes:
        runtime: the runtime of the training that runs or ran last; None before.

    Raises:
        ValueError: when training begins, under DeepSpeed or `torch.nn.DataParallel`.
        ConfigError: when training begins, see `ssdtrain.attach`.
    """

    def __init__(self, config: Config | Mapping[str, Any] | str | Path, **options: Any) -> None:
        self.config, self.options = config, options
        self.runtime: Runtime | None = None
        self._over: int | None = None  # the step that is over and has its log still to come
        self._patches = Patches()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Attach to the model."""
        if getattr(args, "deepspeed", None):
            raise ValueError(_UNDER_DEEPSPEED.format("SSDTrainCallback"))
        if args.n_gpu > 1:
            raise ValueError(
                f"SSDTrainCallback: with {args.n_gpu} GPUs in one process the Trainer copies the model in each step "
                "(torch.nn.DataParallel), and of copies nothing is offloaded: start by torchrun --nproc_per_node "
                f"{args.n_gpu}, or set CUDA_VISIBLE_DEVICES to one GPU"
            )
        self._end()  # of a training that ended by an exception
        runtime = self.runtime = attach(model, self.config, **self.options)
        itself, known = weakref.ref(self), weakref.ref(runtime)

        def runtime_of(trainer: Any) -> Runtime | None:
            return known() if itself() in trainer.callback_handler.callbacks else None

        self._patches.replace(
            transformers.Trainer,
            "log",
            adds_metrics(Interval(runtime.statistics()), runtime_of, self._end_step),
        )

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Tell the runtime that a step begins."""
        self._end_step()
        if self.runtime is not None:
            self.runtime.step_begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell the runtime that a step is over; where the trainer is about to log it, with what it logs."""
        self._over = state.global_step
        if not control.should_log:
            self._end_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the runtime."""
        self._end()

    def _end_step(self) -> None:
        over, self._over = self._over, None
        if self.runtime is not None and over is not None:
            self.runtime.step_end(number=over)

    def _end(self) -> None:
        self._patches.undo()
        self._end_step()
        if self.runtime is not None:
            self.runtime.close()


class SSDTrainPlugin:
    """Attaches to the model that accelerate prepares.

    Example:
        >>> plugin = SSDTrainPlugin({"offload": {"directories": "./spill"}})
        >>> model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)

    `accelerator.log` then logs metrics as `ssdtrain/*` too, and `accelerator.end_training` closes the runtime.

    Args:
        config, options: as in `SSDTrainCallback`.

    Attributes:
        runtime: None until `prepare`.
    """

    def __init__(self, config: Config | Mapping[str, Any] | str | Path, **options: Any) -> None:
        self.config, self.options = config, options
        self.runtime: Runtime | None = None
        self._patches = Patches()

    def prepare(self, accelerator: Any, *objects: Any) -> Any:
        """Return what `accelerator.prepare(*objects)` returns, with the first model that trains attached.

        Raises:
            ValueError: under DeepSpeed; or none of the objects is a model with parameters that train.
        """
        if accelerator.state.deepspeed_plugin is not None:
            raise ValueError(_UNDER_DEEPSPEED.format("SSDTrainPlugin"))
        prepared = accelerator.prepare(*objects)
        every = prepared if isinstance(prepared, tuple) else (prepared,)
        models = (one for one in every if isinstance(one, nn.Module))
        model = next((one for one in models if any(p.requires_grad for p in one.parameters())), None)
        if model is None:
            raise ValueError(
                "SSDTrainPlugin.prepare: none of the objects is a model with parameters that train"
            )
        self.close()
        runtime = self.runtime = attach(model, self.config, **self.options)
        interval = Interval(runtime.statistics())

        def logging(plain: Any) -> Any:
            def log(values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
                return plain(values | metrics_since(interval, runtime), *args, **kwargs)

            return log

        def ending(plain: Any) -> Any:
            def end_training(*args: Any, **kwargs: Any) -> Any:
                self.close()
                return plain(*args, **kwargs)

            return end_training

        self._patches.replace(accelerator, "log", logging)
        self._patches.replace(accelerator, "end_training", ending)
        return prepared

    def close(self) -> None:
        """Close the runtime. Idempotent."""
        self._patches.undo()
        if self.runtime is not None:
            self.runtime.close()


_UNDER_DEEPSPEED = (
    '{}: training runs under DeepSpeed, which has an adapter of its own: write this config as the block "ssdtrain" of '
    "DeepSpeed's config, start by `-m ssdtrain_ds` (docs/deepspeed.md), and leave this out"
)
