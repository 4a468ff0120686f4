"""What is checked of an attached model of plain PyTorch, and which wrapper reduces its gradients."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from ssdtrain.comm.feature import CompressedCollectives
from ssdtrain.config import ConfigError
from ssdtrain.features import FIRST_STEPS, Feature, Forward
from ssdtrain.pytorch import ddp
from ssdtrain.pytorch.sharded import fsdp_classes
from ssdtrain.steps import call_before_steps

logger = logging.getLogger("ssdtrain")


def compress_gradients(model: nn.Module, collectives: CompressedCollectives) -> None:
    """Compress the gradients of a model in DistributedDataParallel or `fully_shard`, for as long as it lives. Where all ranks of
    the job reduce them together, and the loop announces no steps, that ends the steps of these collectives.

    Raises:
        ValueError: nothing about the model reduces gradients.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    comm, before = (
        collectives.comm,
        collectives.before_reduction if _reduces_on_all_ranks(model) else _nothing,
    )
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


def _nothing() -> None:
    """Stand for what is called before gradients are reduced."""


def _reduces_on_all_ranks(model: nn.Module) -> bool:
    """Whether all ranks of the job reduce the gradients of a wrapped model, and not each stage of a pipeline its own."""
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
            raise ConfigError.of("ssdtrain.compact.mode", "lowrank", why, allowed)


def check_unwrapped(model: nn.Module) -> None:
    """Raises ConfigError: a wrapper has the parameters, which the section state would take away."""
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, *fsdp_classes())):
            why = "is in the model: it reduces or shards the same parameters"
            allowed = "one process without a wrapper, or fully_shard with CPUOffloadPolicy in place of the section state"
            raise ConfigError.of("ssdtrain.state", type(module).__name__, why, allowed)


class BypassedModel(Feature):
    """Warns once where an optimizer of the attached model makes steps, and no forward of the model is recorded between them.

    Args:
        again: called at the second step, may see to it that forwards are recorded.
    """

    def __init__(self, again: Callable[[], object] = lambda: None) -> None:
        self._again = again
        self._models: list[weakref.ref[nn.Module]] = []
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._hook = call_before_steps(self._optimizer_steps)

    def attach(self, model: nn.Module) -> None:
        self._models.append(weakref.ref(model))

    def on_forward(self, forward: Forward) -> None:
        self._steps.clear()

    def _optimizer_steps(self, optimizer: Optimizer, *_: object) -> None:
        # One optimizer for each parameter makes many steps after one forward.
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        if steps == 2:
            self._again()
        if steps < FIRST_STEPS:
            return
        model = next((model for known in self._models if (model := known()) is not None), None)
        if model is None or not self._trains(optimizer, model):
            self._steps.clear()
            return
        self.close()
        logger.warning(
            "ssdtrain.attach: an optimizer made %d steps, and no forward with gradients of the attached %s or of a module inside "
            "of it was seen: nothing is done for them. Attach to the module that the loop calls, as it is when training begins, "
            "or run each forward inside of `with runtime.forward():`",
            FIRST_STEPS,
            type(model).__name__,
        )

    @staticmethod
    def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
        """Whether these are steps of the model: the optimizer has its parameters, or as many elements (copies of another dtype),
        and they have gradients."""
        own = {id(parameter): parameter for parameter in model.parameters()}
        groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) in own for parameter in groups):
            return True
        trained = sum(parameter.numel() for parameter in own.values() if parameter.grad is not None)
        return trained > 0 and trained == sum(parameter.numel() for parameter in groups)

    def close(self) -> None:
        self._hook.remove()
