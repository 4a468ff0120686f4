"""Runs a block again in backward as it ran in forward: by the attributes and buffers that its modules had then.

They may be others at the time of backward, and torch's checkpoint would run the block by those. Attributes and what is in
their lists, dicts and sets are put back for each run after the first. A tensor among them, and a parameter, cannot be put back
when it was changed in place: then the second run is an error, as backward is where autograd saved such a tensor.

Note: [Buffers that are changed in place]
DistributedDataParallel writes into all buffers before each forward, BatchNorm and moving averages in it. Autograd notices that
only where it saved the buffer, and not every write moves a version (`F.batch_norm`). So the first run copies the small buffers,
which most of those that change are, and each run after it has copies of these in their place, also to write into: what a forward
counts is counted once. Large ones (a mask, a table of positions) would take memory that the plan does not know of, a copy of one
that requires a gradient is not the tensor that gets it: when the version of one of these has moved, the second run is an error.
Buffers that share memory (views of one small tensor) share their copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ssdtrain.planner.attributes import Attributes

__all__ = ["SMALL", "SameAttributes"]

SMALL = 256 << 10
"""Bytes up to which a buffer is copied."""


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
