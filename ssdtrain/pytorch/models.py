"""Models of plain PyTorch whose gradients are reduced by their wrapper."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ssdtrain.comm import Communicator
from ssdtrain.config import ConfigError, ConfigIssue
from ssdtrain.pytorch import ddp
from ssdtrain.pytorch.sharded import fsdp_classes


def compress_gradients(model: nn.Module, comm: Communicator, before: Callable[[], object]) -> None:
    """Compress the gradients of a model in DistributedDataParallel or `fully_shard`, for as long as it lives.

    Args:
        before: called before gradients are reduced.

    Raises:
        ValueError: nothing about the model reduces gradients.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    if isinstance(model, DistributedDataParallel):
        ddp.attach(model, comm, before)
    elif any(isinstance(module, fsdp_classes()[:1]) for module in model.modules()):
        from ssdtrain.pytorch import fsdp

        fsdp.attach(model, comm, before)
    else:
        raise ValueError(
            f"ssdtrain.comm is asked for, and {type(model).__name__} reduces no gradients: wrap it in "
            "DistributedDataParallel or fully_shard first"
        )


def reduces_on_all_ranks(model: nn.Module) -> bool:
    """True where all ranks of the job reduce the gradients of a wrapped model, and not each stage of a pipeline its own."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        return model.process_group.size() == dist.get_world_size()
    meshes = [one.device_mesh for one in model.parameters() if hasattr(one, "device_mesh")]  # of a DTensor
    return bool(meshes) and max(mesh.size() for mesh in meshes) == dist.get_world_size()


def check_lowrank(model: nn.Module) -> None:
    """Raises ConfigError: a wrapper that was made with the whole weights reduces or shards their gradients."""
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, *fsdp_classes())):
            why = f"meets {type(module).__name__}, which has seen the whole weights"
            allowed = 'attaching before DistributedDataParallel wraps the model, or mode "reconstruct" where it is sharded'
            raise ConfigError([ConfigIssue("ssdtrain.compact.mode", "lowrank", why, allowed)])


def check_unwrapped(model: nn.Module) -> None:
    """Raises ConfigError: a wrapper has the parameters, which the section state would take away."""
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, *fsdp_classes())):
            why = "is in the model: it reduces or shards the same parameters"
            allowed = "one process without a wrapper, or fully_shard with CPUOffloadPolicy in place of the section state"
            raise ConfigError([ConfigIssue("ssdtrain.state", type(module).__name__, why, allowed)])
