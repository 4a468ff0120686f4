"""The names of megatron-core that carry its collectives, checked when something is to be compressed.

The part of `_compat` about communication; nothing else touches these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import layers, mappings

from ssdtrain.integration.compatibility import check_nothing_missing, missing_names
from ssdtrain_megatron._compat import TESTED_MEGATRON, TensorPlace, missing_parameters

TENSOR_PARALLEL = (mappings.__name__, layers.__name__, "ssdtrain_megatron.compact")
"""Modules whose calls of torch.distributed are tensor-parallel or expert-parallel traffic, by their group. The last computes
compressed linear layers in the place of Megatron's."""

GRADIENT_BUFFERS = param_and_grad_buffer.__name__
"""The module whose calls of torch.distributed are data-parallel traffic."""

CALLED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Functions that everybody looks up in torch.distributed: the replacement looks at who calls."""

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
"""What `get_forward_backward_func` returns, looked up when it is called. Their arguments are by name; `model` is one of them."""

_P2P = {
    "tensor_send_prev",
    "tensor_recv_prev",
    "tensor_send_next",
    "tensor_recv_next",
    "group",
    "prev_pipeline_rank",
    "next_pipeline_rank",
}


def check() -> None:
    """Raises ImportError: names all of megatron-core that is to be replaced and that it lacks."""
    missing = missing_names((place.owner, (place.name,)) for found in places().values() for place in found)
    missing += missing_parameters(
        {(schedules, name): ("model",) for name in SCHEDULES if hasattr(schedules, name)}
    )
    for name in ("_batched_p2p_ops", "_p2p_ops"):
        function = getattr(p2p_communication, name, None)
        if function is not None and set(inspect.signature(function).parameters) != _P2P:
            missing.append(f"the parameters {', '.join(sorted(_P2P))} of {p2p_communication.__name__}.{name}")
    check_nothing_missing("megatron-core", megatron.core.__version__, missing, TESTED_MEGATRON)


def places() -> dict[str, tuple[TensorPlace, ...]]:
    """What is replaced while something compresses: functions that are looked up when they are called."""
    return {
        "all_gather": tuple(TensorPlace(module, "dist_all_gather_func") for module in (mappings, layers)),
        "reduce_scatter": tuple(
            TensorPlace(module, "dist_reduce_scatter_func") for module in (mappings, layers)
        ),
        "buffer_all_gather": (TensorPlace(param_and_grad_buffer, "dist_all_gather_func"),),
        "buffer_reduce_scatter": (TensorPlace(param_and_grad_buffer, "dist_reduce_scatter_func"),),
        "coalescing": (TensorPlace(param_and_grad_buffer, "_coalescing_manager"),),
        "batched_p2p": (TensorPlace(p2p_communication, "_batched_p2p_ops"),),
        "p2p": (TensorPlace(p2p_communication, "_p2p_ops"),),
        "schedule": tuple(TensorPlace(schedules, name) for name in SCHEDULES),
        **{name: (TensorPlace(dist, name),) for name in CALLED},
    }


def groups(chunks: Sequence[torch.nn.Module]) -> dict[dist.ProcessGroup, str]:
    """The process groups whose traffic is tensor-parallel ("tp") or expert-parallel ("ep"), by parallel_state and by what the
    models were given themselves."""
    found: dict[dist.ProcessGroup, str] = {}
    named = [
        ("ep", parallel_state.get_expert_model_parallel_group, "ep"),
        ("ep", parallel_state.get_expert_tensor_and_model_parallel_group, "tp_ep"),
        ("tp", parallel_state.get_expert_tensor_parallel_group, "expt_tp"),
        ("tp", parallel_state.get_tensor_model_parallel_group, "tp"),
    ]
    collections = [getattr(module, "pg_collection", None) for chunk in chunks for module in chunk.modules()]
    for dimension, function, name in named:
        for group in (function(check_initialized=False), *(getattr(one, name, None) for one in collections)):
            if isinstance(group, dist.ProcessGroup):
                found[group] = dimension
    return found


def layout() -> dict[str, int]:
    """The sizes of the parallel dimensions of this run."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def data_parallel_size() -> int:
    """Ranks that sum their gradients."""
    return parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether expert parallelism splits what this parameter belongs to."""
    return not getattr(parameter, "allreduce", True)


def tensor_parallel_size(parameter: torch.nn.Parameter) -> int:
    """How many ranks split, or repeat, this parameter."""
    if is_expert(parameter):
        return int(parallel_state.get_expert_tensor_parallel_world_size())
    return int(parallel_state.get_tensor_model_parallel_world_size())


def buckets(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, bucket) of every gradient bucket of a chunk that Megatron's DistributedDataParallel wraps; none of any other."""
    for kind, attribute in (("dense", "buffers"), ("expert", "expert_parallel_buffers")):
        found = getattr(chunk, attribute, None)
        if not isinstance(found, list):
            continue
        for number, buffer in enumerate(found):
            for bucket in buffer.buckets:
                yield f"{kind}{number}.{bucket.bucket_id}", bucket


def loss_scale(optimizer: Any) -> Callable[[], float] | None:
    """Reads the loss scale of this step's gradients; None where they are not scaled."""
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        if getattr(part, "grad_scaler", None) is not None:
            read = part.get_loss_scale
            return lambda: float(read())
    return None


def params_are_master(optimizer: Any) -> bool:
    """Whether model parameters in bfloat16 are part of the optimizer's master copy: it stores only the bits that they lack."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    options = [getattr(part, "config", None) for part in parts]
    return any(
        getattr(found, "use_precision_aware_optimizer", False)
        and getattr(found, "store_param_remainders", False)
        and getattr(found, "bf16", False)
        for found in options
    )
