"""Names of megatron-core that compressed inputs of linear layers depend on."""

from __future__ import annotations

import inspect
from typing import Any

import megatron.core
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

from ssdtrain.integration.compatibility import check_nothing_missing, missing_names
from ssdtrain_megatron._compat import TESTED_MEGATRON, missing_parameters

LINEAR = "linear_with_grad_accumulation_and_async_allreduce"
"""What a parallel linear layer computes with, looked up in `layers` at each call."""
PLACE = layers
_PARAMETERS = ("input", "weight", "bias", "gradient_accumulation_fusion", "sequence_parallel")
_PARALLEL = ("ColumnParallelLinear", "RowParallelLinear")
_UNSUPPORTED = (
    "GroupedMLP",
    "TEGroupedMLP",
    "TELinear",
    "TELayerNormColumnParallelLinear",
    "TERowParallelLinear",
)


def check() -> None:
    """Raises ImportError: names what this megatron-core lacks."""
    missing = missing_parameters({(layers, LINEAR): _PARAMETERS}) + missing_names([(layers, _PARALLEL)])
    check_nothing_missing("megatron-core", megatron.core.__version__, missing, TESTED_MEGATRON)


def is_parallel_linear(module: nn.Module) -> bool:
    """A linear layer of megatron-core's own, whose forward is the class's."""
    return any(
        isinstance(module, cls) and type(module).forward is cls.forward
        for cls in (layers.ColumnParallelLinear, layers.RowParallelLinear)
    )


def unsupported_layers(model: nn.Module) -> list[str]:
    """Classes of linear layers in `model` whose inputs cannot be compressed."""
    found = {
        base.__name__
        for module in model.modules()
        for base in type(module).__mro__
        if base.__name__ in _UNSUPPORTED or base.__module__.startswith("transformer_engine.")
    }
    return sorted(found)


def bound(args: tuple[Any, ...], kwargs: dict[str, Any], function: Any) -> dict[str, Any]:
    """The arguments of a call of `LINEAR` by name."""
    found = inspect.signature(function).bind(*args, **kwargs)
    found.apply_defaults()
    return dict(found.arguments)


def gather_rows(local: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Joins tensors of all ranks along dimension 0; the second value waits."""
    whole = torch.empty(
        (local.shape[0] * group.size(), *local.shape[1:]), dtype=local.dtype, device=local.device
    )
    handle = layers.dist_all_gather_func(whole, local.contiguous(), group=group, async_op=True)
    return whole, handle.wait


def reduce_rows(whole: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Sums over ranks, and leaves each its part of dimension 0; the second value waits."""
    local = torch.empty(
        (whole.shape[0] // group.size(), *whole.shape[1:]), dtype=whole.dtype, device=whole.device
    )
    handle = layers.dist_reduce_scatter_func(local, whole.contiguous(), group=group, async_op=True)
    return local, handle.wait


def tensor_parallel_group(group: Any) -> Any:
    """`group`, or the one of all layers."""
    return layers.get_tensor_model_parallel_group_if_none(group) if group is None else group
