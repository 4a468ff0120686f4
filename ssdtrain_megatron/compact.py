"""Compressed inputs of megatron-core's linear layers.

Note: [Which function]
    The forwards of Column- and RowParallelLinear run as they are: they scatter, copy and reduce around one function of
    `tensor_parallel.layers`. That function is replaced while something is attached, and computes a compressed layer where one
    of those forwards is running.

Note: [Sequence parallelism]
    The compressed input is saved sharded, as the input would be. Backward gathers it, and not the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain.compact import LinearKind, register_kind
from ssdtrain.compact.linear import current_layer
from ssdtrain.config import ConfigError, ConfigIssue
from ssdtrain.integration.patching import Patches
from ssdtrain_megatron import _compat, _compat_compact

_KIND = LinearKind(
    _compat_compact.is_parallel_linear,
    # A row-parallel layer has a part of its input's features, a column-parallel one has all.
    lambda module: int(getattr(module, "input_size_per_partition", module.input_size)),
    within=True,
)


def follow(patches: Patches) -> None:
    """Replace the function of linear layers. See Note: [Which function]."""
    _compat_compact.check()
    register_kind(_KIND)
    patches.replace(_compat_compact.PLACE, _compat_compact.LINEAR, _compressing)


def _compressing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def linear(*args: Any, **kwargs: Any) -> Any:
        layer = current_layer()
        if layer is None or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        given = _compat_compact.bound(args, kwargs, plain)
        x, weight = given["input"], given["weight"]
        if not weight.requires_grad or not layer.compresses(x):
            return plain(*args, **kwargs)
        communication = None
        if given["sequence_parallel"] or given.get("allreduce_dgrad"):
            group = _compat_compact.tensor_parallel_group(given.get("tp_group"))
            communication = _LayerCommunication(group, given["sequence_parallel"])
        return layer(x, weight, given["bias"], communication)

    return linear


class _LayerCommunication:
    """Collectives inside of a column-parallel layer. See Note: [Sequence parallelism]."""

    def __init__(self, group: Any, sequence_parallel: bool) -> None:
        self._group = group
        self._sequence_parallel = sequence_parallel

    def gather_input(self, x: Tensor) -> Tensor:
        if not self._sequence_parallel:
            return x
        whole, wait = _compat_compact.gather_rows(x, self._group)
        wait()
        return whole

    def gather_saved(self, saved: Tensor) -> tuple[Tensor, Callable[[], object]]:
        return (
            _compat_compact.gather_rows(saved, self._group) if self._sequence_parallel else (saved, _nothing)
        )

    def reduce_gradient(self, gradient: Tensor) -> tuple[Tensor, Callable[[], object]]:
        if self._sequence_parallel:
            return _compat_compact.reduce_rows(gradient, self._group)
        gradient = gradient.contiguous()
        handle = torch.distributed.all_reduce(gradient, group=self._group, async_op=True)
        return gradient, handle.wait  # type: ignore[union-attr]


def _nothing() -> None:
    return None


def names_of(chunks: Sequence[nn.Module]) -> dict[int, str]:
    """Return, by the identity of each module, its name as in a model that is not divided into stages: layers are numbered
    globally."""
    found: dict[int, str] = {}
    for chunk in chunks:
        prefixes: dict[str, str] = {"": ""}
        for path, module in chunk.named_modules():
            parent, _, own = path.rpartition(".")
            number = getattr(module, "layer_number", None)
            if own.isdigit() and isinstance(number, int):
                own = str(number - 1)
            name = prefixes[parent]
            prefixes[path] = found[id(module)] = f"{name}.{own}" if name else own
    return found


def refuse(chunks: Sequence[nn.Module], mode: str) -> None:
    """Raises ConfigError: names the mode, and options and layers of Megatron, that exclude compressed inputs."""
    if mode == "lowrank":
        why = "replaces the optimizer's parameters, which is not built for Megatron in this version"
        allowed = '"reconstruct" or "quant"'
        raise ConfigError.of("ssdtrain.compact.mode", mode, why, allowed)
    problems = list(dict.fromkeys(problem for chunk in chunks for problem in _problems(chunk)))
    if problems:
        raise ConfigError(problems)


def _problems(chunk: nn.Module) -> Iterator[ConfigIssue]:
    config = _compat.model_config(chunk)
    without = "leaving it out, or no compact section"
    if getattr(config, "gradient_accumulation_fusion", False):
        why = "computes the weight's gradient from the whole input in a kernel of its own"
        yield ConfigIssue(
            "Megatron's gradient_accumulation_fusion", True, why, "--no-gradient-accumulation-fusion"
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        why = "computes the weight's gradient of the output layer later, from the whole input"
        yield ConfigIssue("Megatron's --defer-embedding-wgrad-compute", True, why, without)
    for name in _compat_compact.unsupported_layers(chunk):
        why = "computes several layers in one kernel, or keeps its inputs by itself; compressing them is not in this version"
        yield ConfigIssue(
            "Megatron's layer", name, why, "the local transformer implementation without grouped GEMM"
        )
