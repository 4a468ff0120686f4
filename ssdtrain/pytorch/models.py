"""Models of plain PyTorch whose gradients are reduced by their wrapper."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ssdtrain.comm import Communicator
from ssdtrain.pytorch import ddp, fsdp


def compress_gradients(model: nn.Module, comm: Communicator) -> None:
    """Compress the gradients of a model in DistributedDataParallel or `fully_shard`, for as long as it lives.

    Raises:
        ValueError: nothing about the model reduces gradients.
    """
    if isinstance(model, DistributedDataParallel):
        ddp.attach(model, comm)
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        fsdp.attach(model, comm)
    else:
        raise ValueError(
            f"ssdtrain.comm is asked for, and {type(model).__name__} reduces no gradients: wrap it in "
            "DistributedDataParallel or fully_shard first"
        )
