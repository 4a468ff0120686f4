"""What the modules of a block keep in plain attributes: a mask that is set before each microbatch, a state that the forward
replaces, a list that it appends to, what counts runs."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Attributes"]

_NOT_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"forward"}
"""Attributes of every module that are not its own: parameters, buffers (see below), modules below it, hooks."""

_SEQUENCES, _MAPPINGS, _SETS = (list, deque), (dict, OrderedDict, defaultdict), (set,)
_CONTAINERS = frozenset({*_SEQUENCES, *_MAPPINGS, *_SETS})


class Attributes:
    """Those of the modules of a block at one time, by reference, and what was in their containers.

    Args:
        block: its parameters, and the tensors among these attributes, are watched for changes in place.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._own = [(vars(module), _own(module), len(vars(module))) for module in block.modules()]
        # By id: a container, and a copy of it. Buffers are put back, and not watched: see `same_attributes`.
        buffers = (module._buffers for module in block.modules() if module._buffers)
        self._contents: dict[int, tuple[Any, Any]] = {id(one): (one, copy.copy(one)) for one in buffers}
        tensors: list[torch.Tensor] = [*block.parameters()]
        for _, own, _ in self._own:
            tensors += self._look_into(own.values())
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def _look_into(self, values: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Note containers, also those inside of others; gives the tensors."""
        for value in values:
            if type(value) in _CONTAINERS:
                if id(value) not in self._contents:
                    self._contents[id(value)] = value, copy.copy(value)
                    yield from self._look_into(value.values() if type(value) in _MAPPINGS else list(value))
            elif isinstance(value, torch.Tensor):
                yield value

    def changed_in_place(self) -> str:
        """Name of a parameter or attribute that was changed in place since; "": none was."""
        changed = next((tensor for tensor, version in self._versions if tensor._version != version), None)
        return "" if changed is None else self.name_of(changed)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Of a parameter, buffer or attribute."""
        return _name_of(tensor, self._block)

    def put_back(self) -> None:
        """Have every attribute, and what is in their containers, as it was."""
        for attributes, own, length in self._own:
            attributes.update(own)
            if len(attributes) != length:
                for name in attributes.keys() - own.keys() - _NOT_OWN:
                    del attributes[name]
        for container, contents in self._contents.values():
            if not _same(container, contents):
                _refill(container, contents)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_OWN}


def _same(one: Any, other: Any) -> bool:
    """Whether two containers of a type hold the same objects, in the same order."""
    if len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True)):
        return False
    return type(one) not in _MAPPINGS or all(
        a is b for a, b in zip(one.values(), other.values(), strict=True)
    )


def _refill(container: Any, contents: Any) -> None:
    container.clear()
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
