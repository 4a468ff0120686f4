"""What a block's forward reads of its modules: plain attributes (a mask that is set before each microbatch, a state that the
forward replaces, a list that it appends to, what counts runs), the modules below them, their parameters and which of these
require gradients, their forward hooks and classes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["Attributes"]

_READ = frozenset(
    {
        "training",
        "_parameters",
        "_buffers",
        "_modules",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    }
)
"""Attributes of every module that its forward reads."""

_NOT_READ = (frozenset(vars(nn.Module())) - _READ) | {"forward"}
"""Attributes of every module that are left alone: hooks of backward and of state dicts."""

_SEQUENCES, _MAPPINGS, _SETS = (list, deque), (dict, OrderedDict, defaultdict), (set,)
_CONTAINERS = frozenset({*_SEQUENCES, *_MAPPINGS, *_SETS})


class _Tensor(NamedTuple):
    """A parameter, or a tensor that is an attribute, before the block's forward."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool


class Attributes:
    """Attributes of the modules of a block at one time, by reference, and what was in their containers.

    Args:
        block: its parameters, and the tensors among these attributes, are watched for changes in place.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        modules = list(block.modules())
        self._own = [(module, type(module), _own(module), len(vars(module))) for module in modules]
        # By id: a container, and a copy of it. Buffers are put back, and not watched: see `same_attributes`.
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._look_into(one for module in modules for one in (module._parameters, module._buffers))
        tensors: list[torch.Tensor] = list(block.parameters())
        for _, _, own, _ in self._own:
            tensors += self._look_into(own.values())
        self._tensors = [
            _Tensor(tensor, tensor._version, tensor.requires_grad)
            for tensor in tensors
            if not tensor.is_inference()
        ]

    def _look_into(self, values: Iterable[Any]) -> list[torch.Tensor]:
        """Note containers, also those inside of others. Returns the tensors."""
        tensors: list[torch.Tensor] = []
        for value in values:
            kind = type(value)
            if kind in _CONTAINERS:
                if id(value) not in self._contents:
                    self._contents[id(value)] = value, value.copy() if value else ()
                    if value:
                        tensors += self._look_into(value.values() if kind in _MAPPINGS else list(value))
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
        return tensors

    def changed_in_place(self) -> str:
        """Name of a parameter or attribute that was changed in place since; "": none was."""
        changed = next((one.tensor for one in self._tensors if one.tensor._version != one.version), None)
        return "" if changed is None else self.name_of(changed)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of a parameter, buffer or attribute."""
        return _name_of(tensor, self._block)

    def put_back(self) -> None:
        """Have every attribute, and what is in their containers, as it was; and every parameter require a gradient as it did."""
        for module, kind, own, length in self._own:
            if type(module) is not kind:  # by torch.nn.utils.parametrize
                module.__class__ = kind
            attributes = vars(module)
            attributes.update(own)
            if len(attributes) != length:
                for name in attributes.keys() - own.keys() - _NOT_READ:
                    del attributes[name]
        for container, contents in self._contents.values():
            if not _same(container, contents):
                _refill(container, contents)
        for tensor, _, requires_grad in self._tensors:
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_READ}


def _same(one: Any, other: Any) -> bool:
    """Whether two containers of a type hold the same objects, in the same order."""
    if not one and not other:
        return True
    if len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True)):
        return False
    return type(one) not in _MAPPINGS or all(
        a is b for a, b in zip(one.values(), other.values(), strict=True)
    )


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if not contents:
        return
    if type(container) in _SEQUENCES:
        container.extend(contents)
    else:
        container.update(contents)


def _name_of(tensor: torch.Tensor, block: nn.Module) -> str:
    for name, one in (*block.named_parameters(), *block.named_buffers()):
        if one is tensor:
            return name
    for path, module in block.named_modules():
        for name, value in _own(module).items():
            if value is tensor:
                return f"{path}.{name}" if path else name
    return "a tensor that was an attribute"
