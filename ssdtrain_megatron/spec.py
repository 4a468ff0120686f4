"""Offload through Megatron-LM's own extension point: `--spec ssdtrain_megatron.spec layer_spec`.

The config is the file that the environment variable SSDTRAIN_CONFIG names. What transformer layers save leaves memory; the
embedding, the loss and the inputs of full recomputation are outside of what a layer sees. The launcher and `attach` cover those
too; where either is in force these layers are ordinary ones.

Each forward of a layer is a tape of its own, and the gradient that reaches the layer's output starts the loads of it and of the
layer below. No schedule of Megatron is replaced. Two autograd functions are, because saved-tensor hooks give them back other
objects than they saved: CheckpointWithoutOutput's, and where the weight's gradient is accumulated by the fused kernel the linear
layer's (see `identity`).

Note: [Collectives]
With a comm section the runtime is attached as the launcher would attach it, as soon as Megatron-LM has made the optimizer: it
covers offloading, too, and the layers are ordinary ones.

Note: [The model of --spec]
With --spec Megatron's builder asks for no more than this module's attribute, and leaves experts, attention and norms to it. So
the submodules of `layer_spec` are a placeholder: each layer is built of those that the builder would have chosen for its config.

Note: [Steps]
A layer does not see steps. One begins with the first forward after the last one's end, and ends when an optimizer of torch
(which those that Megatron uses are, inside) has stepped. A step that Megatron skips is counted together with the next.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_pg_rank

from ssdtrain.config import Config, ConfigError, ConfigIssue, load_config
from ssdtrain.integration.inner_hooks import InnerHooks
from ssdtrain.integration.patching import Patches
from ssdtrain.optimizer_hooks import call_after_steps
from ssdtrain.runtime import Runtime
from ssdtrain_megatron import _compat
from ssdtrain_megatron.attachment import device_of
from ssdtrain_megatron.conflicts import check_conflicts, option_problems
from ssdtrain_megatron.flags import config_from_args
from ssdtrain_megatron.identity import KEEPING_LEAVES, read_inputs_once
from ssdtrain_megatron.installation import installation
from ssdtrain_megatron.pretrain import attaches_for_spec, install_for_spec

__all__ = ["OffloadedTransformerLayer", "default_spec", "layer_spec", "offloaded"]

CONFIG = "SSDTRAIN_CONFIG"


class _Recorder:
    """The runtime of this process's layers, and its steps. See Note: [Steps]."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._open = False
        self._hook = call_after_steps(self._stepped)
        self._patches = Patches()
        self._stashes_leaves = False
        if runtime.engine is not None:
            read_inputs_once(self._patches)
            runtime.engine.eligible.add_freed_function(_compat.FREED_FUNCTION)
            runtime.features.append(InnerHooks(runtime.engine.options.min_bytes))

    def forward(self) -> None:
        """A layer's forward begins."""
        if not self._open:
            self._open = True
            self.runtime.step_begin()

    def _stepped(self, *_: object) -> None:
        if self._open:
            self._open = False
            self.runtime.step_end()

    def register(self, layer: torch.nn.Module) -> None:
        """Know `layer`, at its first forward: there its parameters are where DDP and the optimizer left them."""
        self.runtime.register(layer)
        fused = _compat.model_config(layer).gradient_accumulation_fusion
        if fused and self.runtime.engine is not None and not self._stashes_leaves:
            self._stashes_leaves = True
            of_linear = {name: KEEPING_LEAVES[name] for name in ("linear_forward", "linear_backward")}
            self._patches.replace_all(_compat.replaceable(), of_linear)

    def close(self) -> None:
        self._patches.undo()
        self._hook.remove()
        self.runtime.close()


_recorder: _Recorder | None = None


def _the_recorder(layer: torch.nn.Module) -> _Recorder:
    global _recorder
    if _recorder is None:
        config = _read_config()
        _check_layer(layer, config)
        _recorder = _Recorder(Runtime(config, device=device_of([layer])))
        atexit.register(_recorder.close)
    return _recorder


def _read_config() -> Config:
    """The config of the file that SSDTRAIN_CONFIG names.

    Raises:
        ConfigError: the variable is not set, or the file or its content is invalid.
    """
    file = os.environ.get(CONFIG)
    if not file:
        why = "names no file, and the layers of ssdtrain_megatron.spec (--spec) have their config in the file that it names"
        allowed = (
            "the path of a YAML or JSON file in this environment variable, or the --ssdtrain-* flags with the launcher "
            "(-m ssdtrain_megatron.run)"
        )
        raise ConfigError([ConfigIssue(f"environment variable {CONFIG}", file, why, allowed)])
    return load_config(file)


def _check_command_line() -> None:
    """Check all that needs no model when Megatron's builder imports this module for --spec, before the model is built.

    Raises:
        ConfigError: as `_read_config`, or an option of Megatron's excludes what the file asks for.
    """
    args = _compat.training_args()
    if (getattr(args, "spec", None) or [None])[0] != __name__:
        return  # imported for something else
    flags = config_from_args(args)
    if flags is not None and flags.active:
        return  # the launcher attaches, and checks
    config = _read_config()
    if not config.active:
        return
    if config.compresses:
        install_for_spec(config)
        return
    dense = not getattr(args, "num_experts", None)
    problems = [*option_problems(vars(args), config), *(_bias_problems(args) if dense else ())]
    if problems:
        raise ConfigError(problems)


def _bias_problems(options: Any) -> Iterator[ConfigIssue]:
    """See Note: [Outputs that are parameters] in `recompute`; with --spec the checkpoint function is Megatron's own."""
    modules = getattr(options, "recompute_modules", None) or ()
    selective = getattr(options, "recompute_granularity", None) == "selective"
    if selective and "mlp" in modules and getattr(options, "add_bias_linear", False):
        why = "with a linear bias recurses without end in the first backward: Megatron's checkpoint function takes the bias"
        allowed = "--disable-bias-linear, leaving mlp out, or the launcher (-m ssdtrain_megatron.run) instead of --spec"
        yield ConfigIssue(
            "Megatron's --recompute-modules", list(modules), why + " for its own output", allowed
        )


def _check_layer(layer: torch.nn.Module, config: Config) -> None:
    if not config.active:
        return
    _compat.check()
    problems = []
    if config.compresses:
        why = "compresses collectives, which a transformer layer has no part in"
        allowed = "ssdtrain_megatron.attach(model, config, optimizer=optimizer), or --spec of Megatron-LM's command line"
        problems.append(ConfigIssue("ssdtrain.comm", config.comm, why, allowed))
    if getattr(layer, "recompute_mlp", False):
        problems += _bias_problems(_compat.model_config(layer))
    if problems:
        raise ConfigError(problems)
    check_conflicts([layer], config)


class OffloadedTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's transformer layer, whose saved tensors leave memory between forward and backward."""

    _known = False  # to the runtime

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLayer's: (hidden states of [sequence, batch, hidden], context).

        Raises:
            ConfigError, OSError: SSDTRAIN_CONFIG is not set, or what it names cannot be used, or not with an option of
                Megatron's.
            ImportError: this megatron-core lacks a name that is needed.
        """
        if not torch.is_grad_enabled() or installation.in_force or attaches_for_spec():
            return super().forward(*args, **kwargs)
        recorder = _the_recorder(self)
        if not self._known:
            self._known = True
            recorder.register(self)
        recorder.forward()
        runtime = recorder.runtime
        number, microbatch = self.layer_number, getattr(self, "current_microbatch", 0)
        with runtime.forward(number, microbatch):
            result = super().forward(*args, **kwargs)
        hidden_states = result[0] if isinstance(result, tuple) else result
        if hidden_states.requires_grad:
            hidden_states.register_hook(
                lambda grad: runtime.next_backward((number, microbatch), (number - 1, microbatch))
            )
        return result


class _ConfiguredLayer(OffloadedTransformerLayer):
    """The layer that Megatron's builder would have chosen. See Note: [The model of --spec]."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        if submodules is layer_spec.submodules:
            submodules = _submodules(
                config, layer_number, kwargs.get("vp_stage"), kwargs.get("pg_collection")
            )
        super().__init__(config, submodules, layer_number, *args, **kwargs)


def _submodules(config: Any, layer_number: int, vp_stage: int | None, groups: Any) -> Any:
    """Those of a layer, by its number (from 1) among the layers of this stage.

    Raises:
        ConfigError: names an option that asks for a layer of another class.
    """
    problems = [
        ConfigIssue(f"Megatron's --{option.replace('_', '-')}", value, f"asks for {what}", _OWN_SPEC)
        for option, what in _OTHER_LAYERS.items()
        if (value := getattr(config, option, None))
    ]
    if config.transformer_impl not in ("local", "transformer_engine"):
        why = "asks for layers of another class than layer_spec's"
        problems.append(ConfigIssue("Megatron's --transformer-impl", config.transformer_impl, why, _OWN_SPEC))
    if problems:
        raise ConfigError(problems)
    stage = {} if groups is None else {"pp_rank": get_pg_rank(groups.pp)}
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine" and _has_transformer_engine(),
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
        vp_stage=vp_stage,
        **stage,
    )
    return offloaded(block.layer_specs[layer_number - 1]).submodules


_OWN_SPEC = "the launcher (-m ssdtrain_megatron.run) instead of --spec, or a spec of one's own by `offloaded`"

_OTHER_LAYERS = {
    "experimental_attention_variant": "a block of several kinds of layers, which layer_spec is not",
    "heterogeneous_block_specs": "layers that differ by a file of their own, which layer_spec does not read",
}


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


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def default_spec() -> ModuleSpec:
    """Transformer Engine's layer where it is installed, the local one elsewhere."""
    if _has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec()
    return get_gpt_layer_local_spec()


layer_spec = dataclasses.replace(offloaded(default_spec()), module=_ConfiguredLayer)
"""For --spec, with a GPT. See Note: [The model of --spec]."""

_check_command_line()
