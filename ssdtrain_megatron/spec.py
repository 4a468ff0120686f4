"""Offload through Megatron-LM's own extension point, with nothing replaced: `--spec ssdtrain_megatron.spec layer_spec`.

The config is the file that the environment variable SSDTRAIN_CONFIG names. What transformer layers save leaves memory; the
embedding, the loss and the inputs of full recomputation are outside of what a layer sees. The launcher and `attach` cover those
too; where either is in force these layers are ordinary ones.

Each forward of a layer is a tape of its own, and the gradient that reaches the layer's output starts the loads of it and of the
layer below.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import os
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime
from ssdtrain_megatron.attachment import new_runtime
from ssdtrain_megatron.installation import installation

__all__ = ["OffloadedTransformerLayer", "default_spec", "layer_spec", "offloaded"]

CONFIG = "SSDTRAIN_CONFIG"

_runtime: Runtime | None = None


def _the_runtime(layer: torch.nn.Module) -> Runtime:
    global _runtime
    if _runtime is None:
        file = os.environ.get(CONFIG)
        if not file:
            raise RuntimeError(
                f"ssdtrain_megatron.spec needs the environment variable {CONFIG}: the path of a YAML or JSON file"
            )
        _runtime = new_runtime([layer], load_config(file))
        atexit.register(_runtime.close)
    return _runtime


class OffloadedTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's transformer layer, whose saved tensors leave memory between forward and backward."""

    _known = False  # to the runtime

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLayer's: (hidden states of [sequence, batch, hidden], context).

        Raises:
            RuntimeError: SSDTRAIN_CONFIG is not set.
            ConfigError, OSError: what it names cannot be used.
        """
        if not torch.is_grad_enabled() or installation.in_force:
            return super().forward(*args, **kwargs)
        runtime = _the_runtime(self)
        if not self._known:
            # At the first forward the parameters are where DDP and the optimizer left them.
            self._known = True
            runtime.register(self)
        number, microbatch = self.layer_number, getattr(self, "current_microbatch", 0)
        with runtime.forward(number, microbatch):
            result = super().forward(*args, **kwargs)
        hidden_states = result[0] if isinstance(result, tuple) else result
        if hidden_states.requires_grad:
            hidden_states.register_hook(
                lambda grad: runtime.next_backward((number, microbatch), (number - 1, microbatch))
            )
        return result


def offloaded(spec: ModuleSpec) -> ModuleSpec:
    """A layer spec of TransformerLayer with its module replaced, for specs of one's own.

    Raises:
        ValueError: the spec's module is another class.
    """
    if spec.module is not TransformerLayer:
        raise ValueError(
            f"the spec's module is {spec.module.__name__}: only a TransformerLayer can be replaced"
        )
    return dataclasses.replace(spec, module=OffloadedTransformerLayer)


def default_spec() -> ModuleSpec:
    """Transformer Engine's layer where it is installed, the local one elsewhere."""
    if importlib.util.find_spec("transformer_engine") is None:
        return get_gpt_layer_local_spec()
    return get_gpt_layer_with_transformer_engine_spec()


layer_spec = offloaded(default_spec())
"""For --spec."""
