"""Whether a block may run a second time: what it is called with, what it has, and what it does while it runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtrain.profile.containers import leaves

__all__ = [
    "OBJECT",
    "OTHER_PARAMETERS",
    "Collectives",
    "has_other_parameters",
    "may_run_again",
    "own_generators",
    "transformed",
    "versions",
]

_PLAIN = (
    *(Tensor, type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""What a block is called with, also in containers, where it may run again: a cache, for one, would be filled twice."""


def may_run_again(arguments: Any) -> bool:
    """False if `arguments` hold an object that a second run of the block could find changed by the first. Containers it gets as
    they were: see `ssdtrain.offload.checkpoint`."""
    return all(isinstance(value, _PLAIN) for value in leaves(arguments))


def has_other_parameters(block: nn.Module) -> bool:
    """True while tensors stand in the place of its parameters (`torch.func.functional_call`): in backward they do not."""
    found = (one for module in block.modules() for one in module._parameters.values())
    return not all(one is None or isinstance(one, nn.Parameter) for one in found)


def own_generators(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Why some of these blocks, by name, must not run again: they have random generators, which nobody would restore."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kinds += (numpy.Generator, numpy.RandomState)
    why = "it has a random generator of its own"
    return {
        name: why
        for name, block in blocks.items()
        if any(isinstance(one, kinds) for module in block.modules() for one in vars(module).values())
    }


def transformed() -> bool:
    """True inside of a transform of torch.func: its tensors have no storages, and some of them allow no saved-tensor hooks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place, where torch counts it."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""Namespaces of torch's operators of collectives and of messages between two ranks."""

OTHER_PARAMETERS = (
    "it is called with other tensors in the place of its parameters (torch.func.functional_call)"
)

OBJECT = "it is called with an object that is no tensor or plain value (a cache: use_cache=False)"


class Collectives(TorchDispatchMode):
    """While it is active, calls `seen` before every collective and message of this thread, with its process group where that is
    known, else None.

    A second run of what communicates would pair with whatever another rank, which runs nothing again, sends next.
    """

    def __init__(self, seen: Callable[[Any], None]) -> None:
        super().__init__()
        self._seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled runs compiled all the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A Parameter may come here as a class of its own, without operations of its own.
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a DTensor, for one: its operations on plain tensors are seen
        if func.namespace in COMMUNICATION:
            self._seen(_group_of(args))
        return func(*args, **(kwargs or {}))


def _group_of(arguments: Sequence[Any]) -> Any:
    """The process group among the arguments of an operator; None: it has none of that type."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            try:
                return torch.distributed.ProcessGroup.unbox(value)
            except (AttributeError, RuntimeError, TypeError):
                continue
    return None
