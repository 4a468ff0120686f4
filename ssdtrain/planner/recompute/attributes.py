"""Runs a block again in backward as it ran in forward: by the attributes and buffers that its modules had then.

They may be others at the time of backward, and torch's checkpoint would run the block by those. Attributes and what is in
their lists, dicts and sets are put back for each run after the first. A tensor among them, and a parameter, cannot be put back
when it was changed in place: then the second run is an error, as backward is where autograd saved such a tensor.

Attributes are what a block's forward reads of its modules: plain attributes (a mask that is set before each microbatch, a state
that the forward replaces, a list that it appends to, what counts runs), the modules below them, their parameters and which of
these require gradients, their forward hooks and classes.

Note: [Buffers that are changed in place]
DistributedDataParallel writes into all buffers before each forward, BatchNorm and moving averages in it. Autograd notices that
only where it saved the buffer, and not every write moves a version (`F.batch_norm`). So the first run copies the small buffers,
which most of those that change are, and each run after it has copies of these in their place, also to write into: what a forward
counts is counted once. Large ones (a mask, a table of positions) would take memory that the plan does not know of, a copy of one
that requires a gradient is not the tensor that gets it: when the version of one of these has moved, the second run is an error.
Buffers that share memory (views of one small tensor) share their copy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["SMALL", "Attributes", "SameAttributes"]

SMALL = 256 << 10
"""Bytes up to which a buffer is copied."""

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
        # By id: a container, and a copy of it. Buffers are put back, and not watched: see `SameAttributes`.
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


class _Buffer(NamedTuple):
    """One of the block, before its first run."""

    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None
    """A copy; None: it has none."""
    shared: bool
    """Others share its memory, and their copies that of its copy."""


class SameAttributes:
    """The forward of a block. Each run after the first finds the attributes and buffers of its modules as the first one found
    them, and leaves them as they were before that run.

    Args:
        name: of the block, for errors.
        forward: of the block.

    Raises:
        RuntimeError: from a run after the first: an attribute that is a tensor, a parameter or a large buffer was changed
            in place since the first one began.
    """

    def __init__(self, name: str, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._name, self._block, self._forward = name, block, forward
        self._first: Attributes | None = None
        self._buffers: list[_Buffer] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is None:
            self._first = Attributes(self._block)
            self._buffers = _copied([one for one in self._block.buffers() if not one.is_inference()])
            return self._forward(*args, **kwargs)
        moved = (one for one in self._buffers if one.values is None and one.tensor._version != one.version)
        large = next(moved, None)
        changed = self._first.changed_in_place() if large is None else self._first.name_of(large.tensor)
        if changed:
            raise RuntimeError(
                f"ssdtrain.plan: {changed} of the block {self._name!r} was changed in place since the block's "
                "forward began, and a second run would compute by the change: change it after backward or by an operation that "
                "is not in place (DistributedDataParallel writes into buffers before each forward: broadcast_buffers=False), "
                'leave the block out of plan.blocks, or set plan.recompute to "off"'
            )
        now = Attributes(self._block)
        self._first.put_back()
        self._put_copies()
        try:
            return self._forward(*args, **kwargs)
        finally:
            now.put_back()

    def _put_copies(self) -> None:
        memory: dict[int, Any] = {}
        new = {
            id(one.tensor): _copy_in(memory, one.values) if one.shared else one.values.clone()
            for one in self._buffers
            if one.values is not None
        }
        for module in self._block.modules() if new else ():
            for name, buffer in module._buffers.items():
                if id(buffer) in new:
                    module._buffers[name] = new[id(buffer)]


def _copied(buffers: list[torch.Tensor]) -> list[_Buffer]:
    needing = {_storage(one) for one in buffers if one.requires_grad}
    number = Counter(map(_storage, buffers))
    memory: dict[int, Any] = {}

    def copied(one: torch.Tensor) -> torch.Tensor | None:
        if _storage(one) in needing:
            return None
        if number[_storage(one)] > 1:
            return _copy_in(memory, one) if one.untyped_storage().nbytes() <= SMALL else None
        small = one.layout is not torch.strided or one.nbytes <= SMALL  # a sparse tensor has no nbytes
        return one.detach().clone() if small else None

    return [_Buffer(one, one._version, copied(one), number[_storage(one)] > 1) for one in buffers]


def _copy_in(memory: dict[int, Any], one: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in a copy of its storage, which is made once for all tensors of `memory`."""
    key = _storage(one)
    if key not in memory:
        memory[key] = one.untyped_storage().clone()
    place = one.storage_offset(), one.size(), one.stride()
    return torch.empty(0, dtype=one.dtype, device=one.device).set_(memory[key], *place)


def _storage(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage()._cdata if buffer.layout is torch.strided else id(buffer)
