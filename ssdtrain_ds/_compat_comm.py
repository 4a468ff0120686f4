"""The private names of DeepSpeed that compressed collectives rely on, checked when they are attached.

They are apart from `_compat` because an engine without `comm` needs none of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.module_inject import layers
from deepspeed.moe import sharded_moe
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ssdtrain.integration.compatibility import check_nothing_missing, missing_names
from ssdtrain_ds._compat import TESTED_DEEPSPEED, instruction_map, zero_stage

# Replaced on the optimizer or the coordinator of an engine.
AVERAGE_TENSOR = "average_tensor"
ALLREDUCE_BUCKET = "allreduce_bucket"
REDUCE_AND_PARTITION = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
FETCH = "fetch_sub_module"
# On each parameter of ZeRO-3.
GATHER_PARAMETERS = "all_gather_coalesced"
# Looked up in their modules by the optimizers, and replaced there.
GATHER_GROUPS = "all_gather_dp_groups"

_LAYERS_THAT_SEND = ("MOELayer", "AutoEPMoELayer", "TensorParallel_Layer")
_AUTO_EP = "deepspeed.module_inject.auto_ep_layer"

_NEEDED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (TorchBackend, ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "inference_all_reduce")),
    (TorchBackend, ("recv", "reduce_scatter_tensor", "send")),
    (DeepSpeedEngine, ("allreduce_bucket", "load_checkpoint", "save_checkpoint")),
    (DeepSpeedZeroOptimizer, (AVERAGE_TENSOR, ALLREDUCE_BUCKET, "step")),
    (DeepSpeedZeroOptimizer_Stage3, (REDUCE_AND_PARTITION,)),
    (PartitionedParameterCoordinator, (FETCH,)),
    (stage_1_and_2, (GATHER_GROUPS,)),
    (layers, ("RowParallel", "ColumnParallel")),
    (sharded_moe, ("_AllToAll",)),
    (schedule, ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad")),
)


def check() -> None:
    """Raises ImportError: names all that compressed collectives need and this DeepSpeed lacks."""
    check_nothing_missing("DeepSpeed", deepspeed.__version__, missing_names(_NEEDED), TESTED_DEEPSPEED)


def parameters_of_bucket(optimizer: Any, args: Sequence[Any]) -> list[tuple[torch.nn.Parameter, Any]]:
    """(parameter, process group) of what `average_tensor` is about to reduce, in the order of its elements.

    Args:
        optimizer: of ZeRO-1 or 2.
        args: of the call, behind the tensor.
    """
    if hasattr(optimizer, "ipg_buckets"):
        bucket = optimizer.ipg_buckets[args[0]]
        members, experts = bucket.params, bucket.has_moe_params
    else:  # before 0.17
        members, experts = optimizer.params_in_ipg_bucket, optimizer.ipg_bucket_has_moe_params
    found = []
    for group, index, _ in members:
        parameter = optimizer.bit16_groups[group][index]
        ranks = optimizer.dp_process_group
        if optimizer.reduce_scatter and experts and getattr(parameter, "allreduce", True) is False:
            ranks = optimizer.expert_dp_process_group[parameter.group_name]
        found.append((parameter, ranks))
    return found


def parameters_of_zero_3_bucket(optimizer: Any, args: Sequence[Any]) -> list[torch.nn.Parameter]:
    """The parameters whose gradients ZeRO-3 is about to reduce.

    Args:
        args: of the call.
    """
    if hasattr(optimizer, "ipg_buckets"):
        return list(optimizer.ipg_buckets[args[0]].params)
    return list(optimizer.params_in_ipg_bucket)  # before 0.17


def zero_id(parameter: Any) -> int:
    """ZeRO-3's number of a parameter."""
    return int(parameter.ds_id)


def zero_numel(parameter: Any) -> int:
    """Elements of a parameter that ZeRO-3 may have partitioned."""
    return int(parameter.ds_numel)


def numel(parameter: Any) -> int:
    """Elements of a parameter, under any stage of ZeRO."""
    return zero_numel(parameter) if hasattr(parameter, "ds_numel") else int(parameter.numel())


def data_parallel_size(engine: Any) -> int:
    """Ranks that average their gradients."""
    return int(getattr(engine, "dp_world_size", 1))


def dtypes_by_dimension(engine: Any, parameters: Sequence[torch.nn.Parameter]) -> dict[str, torch.dtype]:
    """What gradients and weights are sent in, by dimension; empty without parameters."""
    weights = next((parameter.dtype for parameter in parameters), None)
    if weights is None:
        return {}
    gradients = getattr(engine, "communication_data_type", None) or weights
    stage = zero_stage(engine)
    dtypes = {"dp": gradients}
    if stage < 3:
        dtypes["dp_gather"] = gradients
    if stage > 0:
        dtypes["zero_gather"] = weights
    return dtypes


def coordinator_of(engine: Any) -> Any:
    """What fetches the weights of ZeRO-3 for modules; None where they are whole."""
    return getattr(getattr(engine.optimizer, "parameter_offload", None), "param_coordinator", None)


def gathers_one_by_one(engine: Any) -> bool:
    """True where ZeRO-3 gathers each parameter by a collective of its own."""
    return bool(getattr(engine, "zero_allgather_sequential", bool)())


def modules_that_gather() -> tuple[ModuleType, ...]:
    """Modules in whose namespaces optimizers look up `GATHER_GROUPS`."""
    return tuple(module for module in (stage_1_and_2, bf16_optimizer) if hasattr(module, GATHER_GROUPS))


def tensor_parallel_functions() -> tuple[type, ...]:
    """The autograd functions of AutoTP whose collectives carry activations or their gradients."""
    names = (
        "RowParallel",
        "ColumnParallel",
        "AsyncColumnParallel",
        "ScatterToTensorParallelRegion",
        "GatherFromTensorParallelRegion",
    )
    return tuple(getattr(layers, name) for name in names if hasattr(layers, name))


def repeated_parameters(engine: Any) -> set[torch.nn.Parameter]:
    """Parameters that ranks of different data-parallel groups hold alike: tied weights of a pipeline's stages, and what
    tensor-parallel ranks repeat."""
    found: set[torch.nn.Parameter] = set()
    if isinstance(engine, PipelineEngine):
        found |= {weight for weight, _ in engine.module.get_tied_weights_and_groups()}
    if _tensor_parallel_size(engine) > 1:
        found |= {p for p in engine.module.parameters() if not is_model_parallel_parameter(p)}
    return found


def _tensor_parallel_size(engine: Any) -> int:
    sizes = [1]
    for holder in (getattr(engine, "mpu", None), getattr(engine, "grid", None)):
        for name in (
            "get_tensor_model_parallel_world_size",
            "get_model_parallel_world_size",
            "get_slice_parallel_world_size",
        ):
            # Of a pipeline's grid the model-parallel size is that of the slice; a model's mpu counts tensor parallelism only.
            if holder is not None and hasattr(holder, name):
                sizes.append(int(getattr(holder, name)()))
                break
    size = getattr(engine, "autotp_size", None)
    return max([*sizes, int(size()) if size is not None else 1])


def expert_functions() -> tuple[type, ...]:
    """The autograd functions that send tokens to experts: of DeepSpeed's own layer, and of AutoEP's."""
    # AutoEP has imported its layer by the time that an engine has one.
    auto_ep = getattr(sys.modules.get(_AUTO_EP), "_AllToAllV", None)
    return (sharded_moe._AllToAll, *([auto_ep] if auto_ep is not None else []))


def layers_that_send(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `model` whose forwards call those functions of experts and of AutoTP."""
    return [
        module
        for module in model.modules()
        if any(base.__name__ in _LAYERS_THAT_SEND for base in type(module).__mro__)
    ]


def _marks_no_parts(engine: Any) -> bool:
    """True where tensor parallelism divides a model and no parameter says so. A stage of a pipeline may have no such layer."""
    return (
        not isinstance(engine, PipelineEngine)
        and _tensor_parallel_size(engine) > 1
        and not any(map(is_model_parallel_parameter, engine.module.parameters()))
    )


def goes_on(*args: Any, **kwargs: Any) -> bool:
    """Whether a call of `load_checkpoint` with these arguments goes on with the run that saved, and does not begin one with its
    weights."""
    given = inspect.signature(DeepSpeedEngine.load_checkpoint).bind(None, *args, **kwargs)
    given.apply_defaults()
    return bool(given.arguments["load_optimizer_states"] and not given.arguments["load_module_only"])


def skipped_steps(engine: Any) -> int:
    """Steps whose gradients overflowed."""
    return int(getattr(engine, "skipped_steps", 0))


def loss_scale(engine: Any) -> Callable[[], float] | None:
    """Reads the loss scale of this step's gradients; None where the optimizer has none."""
    optimizer = engine.optimizer
    if getattr(optimizer, "loss_scale", None) is None:
        return None
    return lambda: float(optimizer.loss_scale)


def _nodes() -> int:
    """Return the number of nodes, as DeepSpeed counts them where it decides whether to quantise gradients."""
    return int(torch.distributed.get_world_size() // max(get_accelerator().device_count(), 1))


def _sums_weights(engine: Any) -> bool:
    """True where ZeRO-3 gathers weights by an all-reduce."""
    zero = getattr(getattr(engine, "_config", None), "zero_config", None)
    return bool(getattr(zero, "use_all_reduce_for_fetch_params", False))


def bypasses(engine: Any) -> list[str]:
    """Parts of this engine's config whose messages do not pass the intercepted collectives."""

    def asks_for(name: str) -> bool:
        return bool(getattr(engine, name, bool)())  # False where this version has no such option

    found = []
    if asks_for("is_deepcompile_enabled"):
        found.append("DeepCompile issues collectives inside compiled graphs: they go uncompressed")
    if isinstance(engine, PipelineEngine) and any(
        kind.__name__ == "CommitP2P" for kind in instruction_map(engine)
    ):
        found.append(
            "DualPipeV sends its stages' messages in batches of its own: pp_forward and pp_backward go uncompressed"
        )
    if zero_stage(engine) in (1, 2) and not getattr(
        engine.optimizer, "use_multi_rank_bucket_allreduce", True
    ):
        found.append(
            "use_multi_rank_bucket_allreduce is false in zero_optimization: gradients are reduced to one rank at a time, "
            "uncompressed; leave the key out"
        )
    if asks_for("zero_quantized_weights"):
        found.append(
            "zero_quantized_weights is on: DeepSpeed quantises these itself, and they are left to it"
        )
    if asks_for("zero_quantized_gradients"):
        if zero_stage(engine) == 3 and _nodes() > 1:
            what = "DeepSpeed quantises these itself, and they are left to it"
        else:
            what = "DeepSpeed quantises on several nodes with ZeRO-3 only; here comm.dp compresses them: leave out the key"
        found.append(f"zero_quantized_gradients is on: {what}")
    if _marks_no_parts(engine):
        found.append(
            "tensor parallelism is on, and no parameter is marked as one rank's part (parameter.model_parallel = True): all "
            "count as those that its ranks repeat, whose gradients and weights go uncompressed; mark those of divided layers "
            "before deepspeed.initialize"
        )
    if asks_for("sparse_gradients_enabled") or any(
        isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        for module in engine.module.modules()
    ):
        found.append("embeddings have sparse gradients, which go uncompressed")
    if zero_stage(engine) == 3 and _sums_weights(engine):
        found.append(
            "stage3_use_all_reduce_for_fetch_params is on in zero_optimization: weights that are fetched together go "
            "uncompressed; leave the key out"
        )
    return found
