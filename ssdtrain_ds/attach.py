"""Attaches a runtime to each DeepSpeed engine whose config has an `ssdtrain` block.

Note: [What is patched]
`install` wraps `DeepSpeedEngine.__init__` alone: whoever imported `deepspeed.initialize` before is covered as well, and so is
everything that builds engines itself (accelerate). An engine whose config asks for something gets its own `forward`,
`backward`, `step` and `destroy` as instance attributes; an engine without the block keeps the class's functions untouched.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from ssdtrain.config import Config, ConfigError, Problem, load_config
from ssdtrain.runtime import Runtime
from ssdtrain_ds import _compat

__all__ = ["install", "runtime_of", "uninstall"]

BLOCK = "ssdtrain"

_PLAIN = "_ssdtrain_plain_init"


def install() -> None:
    """Let `deepspeed.initialize` read the `ssdtrain` block. Idempotent.

    Raises:
        ImportError: this DeepSpeed lacks a name that is needed.
    """
    _compat.check()
    cls = _compat.DeepSpeedEngine
    plain = cls.__init__
    if hasattr(plain, _PLAIN):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        block = _compat.parameter_dict(given["config_class"]).get(BLOCK)
        # A mistake in the block is found before the model is partitioned.
        config = load_config(block, path=BLOCK) if block is not None else None
        plain(self, *args, **kwargs)
        if config is not None and config.active:
            _attach(self, config)

    setattr(init, _PLAIN, plain)
    cls.__init__ = init


def uninstall() -> None:
    """Undo `install` for engines made from now on. Engines that exist keep their runtime."""
    plain = getattr(_compat.DeepSpeedEngine.__init__, _PLAIN, None)
    if plain is not None:
        _compat.DeepSpeedEngine.__init__ = plain


def runtime_of(engine: Any) -> Runtime | None:
    """The runtime of `engine`, or None if its config has no active `ssdtrain` block."""
    found = engine.__dict__.get("ssdtrain_runtime")
    return found if isinstance(found, Runtime) else None


def _attach(engine: Any, config: Config) -> None:
    if _compat.is_pipeline(engine):
        why = "with a PipelineModule is not in this version"
        raise ConfigError(
            [Problem(f"{BLOCK}.offload", config.to_dict()["offload"], why, "a model without pipeline stages")]
        )
    runtime = Runtime(
        config,
        device=engine.device,
        rank=torch.distributed.get_rank() if torch.distributed.is_initialized() else 0,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))),
    )
    assert runtime.engine is not None
    runtime.engine.eligible.fixed_when(_compat.is_zero_parameter)
    runtime.register(engine.module)
    engine.__dict__["ssdtrain_runtime"] = runtime
    forward, backward, step, destroy = engine.forward, engine.backward, engine.step, engine.destroy

    @functools.wraps(forward)
    def offloaded_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with runtime.forward():
            return forward(*args, **kwargs)

    @functools.wraps(backward)
    def offloaded_backward(*args: Any, **kwargs: Any) -> Any:
        with runtime.backward():
            return backward(*args, **kwargs)

    @functools.wraps(step)
    def counted_step(*args: Any, **kwargs: Any) -> Any:
        boundary = engine.is_gradient_accumulation_boundary()
        found = step(*args, **kwargs)
        if boundary:
            runtime.step_end()
            runtime.step_begin()
        return found

    @functools.wraps(destroy)
    def closing_destroy(*args: Any, **kwargs: Any) -> Any:
        runtime.close()
        for name in own:
            engine.__dict__.pop(name, None)
        return destroy(*args, **kwargs)

    own: dict[str, Callable[..., Any]] = {
        "forward": offloaded_forward,
        "backward": offloaded_backward,
        "step": counted_step,
        "destroy": closing_destroy,
    }
    engine.__dict__.update(own)
    runtime.step_begin()
