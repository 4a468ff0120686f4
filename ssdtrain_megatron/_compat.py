"""Every name of megatron-core that this package relies on, checked at install.

A missing name or parameter is an ImportError that names it. The training loop's names (`megatron.training`, which is on no
package registry) are checked by `check_training`, only where that loop is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import megatron.core
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

from ssdtrain.integration.compatibility import check_nothing_missing, missing_names, warn_if_untested

TESTED_MEGATRON = ("0.14.0", "0.15.3", "0.16.1")
"""Versions of megatron-core that the tests were run with."""
TESTED_IN_PART = ("0.17.1", "0.18.2", "0.19.0")
"""Versions of which only the rows named in docs/versions.md were run."""

_PARAMETERS: dict[tuple[ModuleType, str], tuple[str, ...]] = {
    (schedules, "forward_step"): ("model", "num_microbatches", "current_microbatch"),
    (schedules, "backward_step"): ("output_tensor",),
    (random, "checkpoint"): ("function", "distribute_saved_activations"),
    (tensor_parallel, "checkpoint"): ("function", "distribute_saved_activations"),
}
_METHODS = {
    "CheckpointWithoutOutput": ("checkpoint", "discard_output_and_register_recompute"),
    "CudaRNGStatesTracker": ("get_states", "set_states"),
}
"""Names of classes of `random`."""

_FUNCTIONS: dict[tuple[ModuleType, str], tuple[str, ...]] = {
    (layers, "LinearWithGradAccumulationAndAsyncCommunication"): ("ctx", "input", "weight"),
    (random, "CheckpointFunction"): ("ctx", "run_function", "distribute_saved_activations"),
    (random, "CheckpointWithoutOutputFunction"): ("ctx", "run_function", "checkpoint_without_output_obj"),
}
"""Autograd functions, and how the arguments of their forward begin."""

OFFLOAD_MODULES: dict[str, tuple[str, ...]] = {
    "attn_norm": ("*.input_layernorm",),
    "qkv_linear": ("*.self_attention.linear_qkv",),
    "core_attn": ("*.core_attention",),
    "attn_proj": ("*.self_attention.linear_proj",),
    "mlp_norm": ("*.pre_mlp_layernorm",),
    "expert_fc1": ("*.experts.linear_fc1", "*.local_experts.*.linear_fc1"),
    "moe_act": ("=*.experts", *(f"=*.local_experts.{'[0-9]' * digits}" for digits in (1, 2, 3))),
}
"""Patterns of modules by the names of `--offload-modules`. The activation function of experts is no module: what it saves, the
module of the experts saves itself."""

_TRAINING: dict[str, tuple[str, ...]] = {
    "arguments": ("add_megatron_arguments",),
    "training": (
        "setup_model_and_optimizer",
        "training_log",
        "save_checkpoint",
        "get_args",
        "get_tensorboard_writer",
        "get_wandb_writer",
        "print_rank_last",
    ),
}


def check() -> None:
    """Check that megatron-core has every name this package needs; warn about an untested version.

    Raises:
        ImportError: names all that is missing.
    """
    missing = missing_parameters(_PARAMETERS)
    for (module, name), parameters in _FUNCTIONS.items():
        function = getattr(module, name, None)
        forward = getattr(function, "forward", None)
        if not callable(forward) or not callable(getattr(function, "backward", None)):
            missing.append(f"{module.__name__}.{name}")
        elif tuple(inspect.signature(forward).parameters)[: len(parameters)] != parameters:
            missing.append(f"the parameters {', '.join(parameters)} of {module.__name__}.{name}.forward")
    missing += missing_names([(random, tuple(_METHODS))])
    missing += missing_names(
        (getattr(random, name), names) for name, names in _METHODS.items() if hasattr(random, name)
    )
    check_nothing_missing("megatron-core", megatron.core.__version__, missing, TESTED_MEGATRON)
    warn_if_untested(
        "megatron-core", megatron.core.__version__, TESTED_MEGATRON, TESTED_IN_PART, "docs/versions.md"
    )


def missing_parameters(needed: Mapping[tuple[ModuleType, str], Sequence[str]]) -> list[str]:
    """What is missing of the functions `needed`, by module and name, with the parameters that they must have."""
    missing = []
    for (module, name), parameters in needed.items():
        function = getattr(module, name, None)
        known = inspect.signature(function).parameters if callable(function) else {}
        missing += [f"the parameter {p} of {module.__name__}.{name}" for p in parameters if p not in known]
    return missing


def check_training() -> tuple[ModuleType, ModuleType]:
    """`megatron.training.arguments` and `megatron.training.training`, with the names that are needed there.

    Raises:
        ImportError: Megatron-LM's checkout is not on the path, or names all that is missing.
    """
    try:
        from megatron.training import arguments, training
    except ImportError as error:
        raise ImportError(
            "megatron.training cannot be imported; it is part of a Megatron-LM checkout, not of the package "
            f"megatron-core: put the checkout on PYTHONPATH or start its script from there ({error})"
        ) from error
    missing = missing_names([(arguments, _TRAINING["arguments"]), (training, _TRAINING["training"])])
    check_nothing_missing(
        "the Megatron-LM of megatron-core", megatron.core.__version__, missing, TESTED_MEGATRON
    )
    return arguments, training


class ScheduleStep(NamedTuple):
    """What the arguments of a call of `schedules.forward_step` identify."""

    model: torch.nn.Module
    microbatch: int | None
    microbatches: int
    """Microbatches of the whole step."""


_forward_signature = inspect.signature(schedules.forward_step)
_backward_signature = inspect.signature(schedules.backward_step)


def read_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ScheduleStep:
    """The arguments of one call of `schedules.forward_step`."""
    given = _forward_signature.bind(*args, **kwargs).arguments
    return ScheduleStep(given["model"], given.get("current_microbatch"), given["num_microbatches"])


def output_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The output whose backward one call of `schedules.backward_step` runs."""
    return first_output(_backward_signature.bind(*args, **kwargs).arguments["output_tensor"])


def first_output(output: object) -> object:
    """Schedules hand outputs around singly or in a list, and one list may hold what another call gets singly."""
    while isinstance(output, list | tuple) and output:
        output = output[0]
    return output


def model_config(chunk: torch.nn.Module) -> Any:
    """The TransformerConfig of a chunk, below whatever wraps it."""
    return get_model_config(chunk)


def pipeline_stages(chunk: torch.nn.Module) -> int:
    """Pipeline stages of the job that `chunk` is of."""
    return int(model_config(chunk).pipeline_model_parallel_size)


def is_transformer_layer(module: torch.nn.Module) -> bool:
    """True for a layer of a TransformerBlock, whose forward takes hidden states and returns them with a context."""
    return isinstance(module, TransformerLayer)


def tensor_group() -> Any:
    """The ranks of this one's tensor parallelism; None: there are no others."""
    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return group if group is not None and torch.distributed.get_world_size(group) > 1 else None


def random_tracker() -> Any:
    """Megatron's tracker of random states; it may be another object after a new seed."""
    return random.get_cuda_rng_tracker()


class TensorPlace(NamedTuple):
    """Where a function lives that is replaced while something is attached."""

    owner: Any
    name: str


def replaceable() -> dict[str, tuple[TensorPlace, ...]]:
    """The functions that are looked up when they are called, so that replacing them here is enough."""
    return {
        "forward_step": (TensorPlace(schedules, "forward_step"),),
        "backward_step": (TensorPlace(schedules, "backward_step"),),
        "checkpoint": (TensorPlace(tensor_parallel, "checkpoint"), TensorPlace(random, "checkpoint")),
        "discarding_checkpoint": (TensorPlace(random.CheckpointWithoutOutput, "checkpoint"),),
        "linear_forward": (TensorPlace(layers.LinearWithGradAccumulationAndAsyncCommunication, "forward"),),
        "linear_backward": (TensorPlace(layers.LinearWithGradAccumulationAndAsyncCommunication, "backward"),),
        "checkpoint_forward": (TensorPlace(random.CheckpointFunction, "forward"),),
        "checkpoint_backward": (TensorPlace(random.CheckpointFunction, "backward"),),
        "discarding_forward": (TensorPlace(random.CheckpointWithoutOutputFunction, "forward"),),
        "discarding_backward": (TensorPlace(random.CheckpointWithoutOutputFunction, "backward"),),
    }


FREEING_FUNCTION = "CheckpointWithoutOutputFunctionBackward"
"""The node of the autograd function whose outputs CheckpointWithoutOutput frees."""


def _iteration(directory: str, iteration: int) -> Path:
    """Where Megatron-LM puts the files of one iteration."""
    return Path(directory, f"iter_{iteration:07d}")


def loaded_checkpoint(args: Any, iteration: int) -> Path | None:
    """The directory of the checkpoint that a run of Megatron-LM resumed from after `iteration`, or None."""
    return _iteration(args.load, iteration) if getattr(args, "load", None) and iteration else None


def saved_checkpoint(args: Any, given: Mapping[str, Any]) -> Path | None:
    """The directory that one call of `save_checkpoint` wrote to; None for those that are soon removed.

    Args:
        given: arguments of the call.
    """
    if not getattr(args, "save", None) or given.get("non_persistent_ckpt", False):
        return None
    return _iteration(args.save, given["iteration"])


def marked_not_offload(tensor: torch.Tensor) -> bool:
    """Whether `mark_not_offload` of Transformer Engine or Megatron was called for `tensor`, whose owner needs it."""
    return getattr(tensor, "_TE_do_not_offload", False) or getattr(tensor, "_do_not_offload", False)
