"""Every private name of DeepSpeed that this package relies on, checked at install.

Run with the versions in `TESTED_DEEPSPEED`. Others are tried with a warning; a missing name is an ImportError that names it.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as communication
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.utils.z3_leaf_module import z3_leaf_module

from ssdtrain import ranks
from ssdtrain.integration.compatibility import check_nothing_missing, missing_names, warn_if_untested

TESTED_DEEPSPEED = ("0.16.9", "0.17.6", "0.18.9", "0.19.8")

# (where, the names that must be there)
_NEEDED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (DeepSpeedEngine, ("forward", "backward", "step", "destroy", "zero_optimization_stage")),
    (PipelineEngine, ("_INSTRUCTION_MAP", "_exec_schedule")),
    (schedule, ("ForwardPass", "BackwardPass", "RecvGrad", "TrainSchedule")),
    (
        checkpointing,
        ("CPU_CHECKPOINT", "CheckpointFunction", "PARTITION_ACTIVATIONS", "get_cuda_rng_tracker"),
    ),
    (checkpointing, ("is_configured", "non_reentrant_checkpoint")),
)

# What a pipeline engine gets of its own.
INSTRUCTION_MAP = "_INSTRUCTION_MAP"
EXEC_SCHEDULE = "_exec_schedule"

# The names that DeepSpeed's checkpoint functions look up in their module, and that are replaced there.
CHECKPOINT_FUNCTION = "CheckpointFunction"
EXTRACT_TENSORS = "extract_tensors"

CPU_CHECKPOINTING_ENGINE = "_get_cpu_offload_engine"

# Before 0.19, where there is no such engine: what copies inputs to the host, and what then empties them.
COPY_TO_DEVICE = "copy_to_device"
EMPTY_INPUTS = "get_cpu_activations_for_backward"

# What makes the inputs of a recomputation out of held tensors; before 0.19 nothing reads a held tensor back before that where
# the checkpoint function is not reentrant.
DETACH = "detach_variable"

# What `checkpointing` reads from and writes to its own checkpoint function's context.
_NEEDED_IN_CHECKPOINT_FUNCTION = ("deepspeed_saved_tensors", "saved_data")

_NEEDED_ON_ENGINE = ("module", "device", "global_rank", "global_steps", "global_samples", "monitor")


def check() -> None:
    """Check that DeepSpeed has every name this package needs; warn about an untested version.

    Raises:
        ImportError: names what is missing.
    """
    missing = missing_names(_NEEDED)
    missing += [
        f"deepspeed.checkpointing.CheckpointFunction ctx.{name}"
        for name in _NEEDED_IN_CHECKPOINT_FUNCTION
        if name not in _names_used(getattr(checkpointing, "CheckpointFunction", None))
    ]
    if not missing:
        missing = missing_names([(checkpointing, replaced_names())])
    check_nothing_missing("DeepSpeed", deepspeed.__version__, missing, TESTED_DEEPSPEED)
    warn_if_untested("DeepSpeed", deepspeed.__version__, TESTED_DEEPSPEED)


def check_engine(engine: Any) -> None:
    """Check that an engine has every attribute this package reads.

    Raises:
        ImportError: names what is missing.
    """
    missing = [name for name in _NEEDED_ON_ENGINE if not hasattr(engine, name)]
    check_nothing_missing("the engine of DeepSpeed", deepspeed.__version__, missing, TESTED_DEEPSPEED)


def replaced_names() -> tuple[str, ...]:
    """What `ssdtrain_ds.checkpointing` replaces in DeepSpeed's module while an engine offloads."""
    names = [CHECKPOINT_FUNCTION, EXTRACT_TENSORS]
    if hasattr(checkpointing, CPU_CHECKPOINTING_ENGINE):
        names.append(CPU_CHECKPOINTING_ENGINE)
    else:
        names += [COPY_TO_DEVICE, EMPTY_INPUTS]
    if "saved_data" not in set(_names_in(checkpointing.non_reentrant_checkpoint.__code__)):
        names.append(DETACH)
    return tuple(names)


def _names_used(function_class: Any) -> set[str]:
    """The attribute names and constants in the code of an autograd function's forward and backward."""
    found: set[str] = set()
    for name in ("forward", "backward"):
        code = getattr(getattr(function_class, name, None), "__code__", None)
        if code is not None:
            found |= set(_names_in(code))
    return found


def _names_in(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif hasattr(constant, "co_names"):
            yield from _names_in(constant)


def parameter_dict(config_class: Any) -> dict[str, Any]:
    """The config as the user wrote it, whether it came as a dict, a file or base64.

    Raises:
        ImportError: this DeepSpeed keeps it elsewhere.
    """
    found = getattr(config_class, "_param_dict", None)
    missing = [] if isinstance(found, dict) else ["DeepSpeedConfig._param_dict"]
    check_nothing_missing("DeepSpeed", deepspeed.__version__, missing, TESTED_DEEPSPEED)
    return dict(found or {})


def set_zero_section(config_class: Any, section: dict[str, Any]) -> None:
    """Have an engine that is being made read `section` in place of what was written as `zero_optimization`.

    Raises:
        ImportError: this DeepSpeed keeps it elsewhere.
    """
    missing = [name for name in ("_param_dict", "zero_config") if not hasattr(config_class, name)]
    check_nothing_missing("DeepSpeedConfig", deepspeed.__version__, missing, TESTED_DEEPSPEED)
    config_class._param_dict = {**config_class._param_dict, "zero_optimization": section}
    config_class.zero_config = get_zero_config(config_class._param_dict)


def is_partitioned(model: torch.nn.Module) -> bool:
    """True where `deepspeed.zero.Init` has split the model's parameters, as its own config says."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def device_memory() -> int | None:
    """Bytes of the smallest memory of the GPUs that an engine is being made for; None: it is made for CPUs. All ranks call it,
    and get the same, since what follows from it decides what they gather."""
    if get_accelerator().device_name() != "cuda":
        return None
    # The engine, which makes its device the current one, comes later.
    index = (
        ranks.local_rank() if ranks.local_rank() < torch.cuda.device_count() else torch.cuda.current_device()
    )
    memory = torch.cuda.get_device_properties(index).total_memory
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return int(memory)
    smallest = torch.tensor([memory], dtype=torch.int64, device=torch.device("cuda", index))
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return int(smallest.item())


def existing_engines() -> list[Any]:
    """The engines of this process that still exist."""
    # By the class: objects may lie about theirs, or compute it.
    return [found for found in gc.get_objects() if issubclass(type(found), DeepSpeedEngine)]


def config_of(engine: Any) -> dict[str, Any]:
    """The config that `engine` was made with; empty where it was not made to its end."""
    config = engine.__dict__.get("_config")
    return {} if config is None else parameter_dict(config)


def is_pipeline(engine: DeepSpeedEngine) -> bool:
    """True for a PipelineEngine, whose schedule bypasses the engine's forward."""
    return isinstance(engine, PipelineEngine)


def is_plain_engine(engine: DeepSpeedEngine) -> bool:
    """True for DeepSpeed's engine and its pipeline engine themselves, not for what is derived from them."""
    return type(engine) in (DeepSpeedEngine, PipelineEngine)


def has_experts(engine: DeepSpeedEngine) -> bool:
    """True where layers of the model are DeepSpeed's mixtures of experts."""
    return bool(getattr(engine, "has_moe_layers", False))


def has_random_ltd(engine: DeepSpeedEngine) -> bool:
    """True for random layer token drop, where layers read what the first one sampled in the latest forward."""
    return bool(getattr(engine, "random_ltd_enabled", bool)())


def communicates_past_torch(engine: DeepSpeedEngine) -> bool:
    """True where collectives of a forward may not pass torch.distributed: a backend of DeepSpeed's own, or its operator for
    shared memory, which tensor parallelism takes on CPUs."""
    backend = getattr(communication, "cdb", None)
    if backend is not None and type(backend) is not TorchBackend:
        return True
    shared = getattr(backend, "shm_comm_op", None) is not None
    return shared and int(getattr(engine, "autotp_size", int)()) > 1


def checkpoint_interval(engine: PipelineEngine) -> int:
    """Layers that a pipeline's module recomputes together; 0: it recomputes none."""
    return int(getattr(engine.module, "activation_checkpoint_interval", 0))


def layers_of(stage: torch.nn.Module) -> list[str]:
    """Names of the modules that a pipeline stage runs as layers, without tied ones, in their order."""
    run = [id(layer) for layer in getattr(stage, "forward_funcs", ())]
    return [name for name, module in stage.named_children() if run.count(id(module)) == 1]


def stages_of(engine: PipelineEngine) -> int:
    """Pipeline stages; a DualPipeV rank holds two halves of one."""
    return int(engine.module.num_stages)


def instruction_map(engine: PipelineEngine) -> dict[type, Any]:
    """Which function executes which instruction: functions that take the engine, found by the class of the instruction."""
    return dict(getattr(engine, INSTRUCTION_MAP))


def foreign_instructions(engine_class: type) -> list[str]:
    """Names of the pipeline instructions that were added to DeepSpeed's own, as Megatron-DeepSpeed does for zero bubble."""
    known: dict[type, Any] = getattr(engine_class, INSTRUCTION_MAP, {})
    return sorted(kind.__name__ for kind in known if not kind.__module__.startswith("deepspeed."))


def zero_stage(engine: DeepSpeedEngine) -> int:
    return int(engine.zero_optimization_stage())


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a parameter, also where ZeRO-3 partitions it, which leaves an empty one."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def running_modules(engine: DeepSpeedEngine) -> list[torch.nn.Module] | None:
    """ZeRO-3's list of the modules whose forwards run, of all engines: each is taken off after its forward, unless that raises.
    None: no such list."""
    found = getattr(parameter_offload, "FWD_MODULE_STACK", None)
    return found if zero_stage(engine) == 3 and isinstance(found, list) else None


def is_zero_parameter(tensor: torch.Tensor) -> bool:
    """True for a parameter that ZeRO-3 partitions, and for a view of one: its gathered storage is DeepSpeed's to free."""
    base = tensor._base
    return hasattr(tensor, "ds_id") or (base is not None and hasattr(base, "ds_id"))


def gathering_group(engine: DeepSpeedEngine) -> Any:
    """The ranks over which ZeRO-3 partitions parameters, which forwards gather; None: there are no others."""
    if zero_stage(engine) < 3:
        return None
    group = getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group
    return group if group is not None and torch.distributed.get_world_size(group) > 1 else None


def gathering_points(model: torch.nn.Module) -> dict[torch.nn.Module, Callable[[], list[torch.Tensor]]]:
    """The modules before whose forwards ZeRO-3 gathers parameters, each with what returns those: its own, those that were
    registered as external to it, and all below it where it is a leaf (`set_z3_leaf_modules`)."""
    return {
        module: functools.partial(_gathered_for, module)
        for module in model.modules()
        if module._parameters or hasattr(module, "ds_external_parameters")
    }


def _gathered_for(module: torch.nn.Module) -> list[torch.Tensor]:
    owners = module.modules() if z3_leaf_module(module) else (module,)
    # The values are read past `__getitem__`, which gathers what is not there.
    found: list[torch.Tensor] = []
    for owner in owners:
        found += [parameter for parameter in owner._parameters.values() if parameter is not None]
    external = getattr(module, "ds_external_parameters", None)
    return found if external is None else [*found, *(parameter for _, parameter in external())]


def rng_tracker() -> Any:
    """The generators that DeepSpeed's model parallelism forks."""
    return checkpointing.get_cuda_rng_tracker()


def checkpointing_is_configured() -> bool:
    """True once `deepspeed.checkpointing.configure` was called."""
    return bool(checkpointing.is_configured())


def asks_for_offload_engine() -> bool:
    """True where DeepSpeed's checkpoint functions hand inputs to an engine: cpu_checkpointing without partitions."""
    return bool(checkpointing.CPU_CHECKPOINT and not checkpointing.PARTITION_ACTIVATIONS)


def get_saved_inputs(node: Any) -> tuple[Any, ...] | None:
    """The inputs that DeepSpeed's autograd function keeps for backward on its context `node`; None: another function's."""
    held = getattr(node, "deepspeed_saved_tensors", None)
    return None if held is None else tuple(held)


def set_saved_inputs(node: Any, tensors: tuple[Any, ...]) -> None:
    """Replace what `get_saved_inputs` returned."""
    node.deepspeed_saved_tensors = tensors


def is_with_an_engine(tensor: torch.Tensor) -> bool:
    """True for an input that was handed to an engine for cpu_checkpointing, and is empty now."""
    return getattr(tensor, "ds_offload_id", None) is not None


def partition_of(tensor: torch.Tensor) -> Any:
    """The holder of the bytes of a saved input that is empty itself; None: the tensor has its bytes."""
    return getattr(tensor, "saved_data", None)


def set_partition(tensor: Any, data: Any) -> None:
    """Make the recomputation read the bytes of `tensor` by `data.to(device)`."""
    tensor.saved_data = data


def trainer_class() -> Any:
    """Hugging Face's Trainer, or None where it is not imported."""
    module = sys.modules.get("transformers.trainer")
    return getattr(module, "Trainer", None)


PASSING_FUNCTIONS = ("PreBackwardFunctionForModule", "PostBackwardFunctionModule")
"""ZeRO-3's functions around every module's outputs and inputs; they return what they got, and backward calls ZeRO by them."""

_DIVIDED_LAYER = "TensorParallel_Layer"


def tensor_parallel_layers(model: torch.nn.Module) -> list[str]:
    """Return the qualified names of the layers that AutoTP has put into `model`."""
    return [
        name
        for name, module in model.named_modules()
        if any(base.__name__ == _DIVIDED_LAYER for base in type(module).__mro__)
    ]
