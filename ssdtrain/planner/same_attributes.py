"""Runs a block again in backward as it ran in forward: by the attributes that its modules had then.

They may be others at the time of backward, and torch's checkpoint would run the block by those. Attributes and what is in
their lists, dicts and sets are put back for each run after the first. A tensor among them, and a parameter, cannot be put back
when it was changed in place: then the second run is an error, as backward is where autograd saved such a tensor. Buffers are
watched where steps are profiled (`ssdtrain.profile.spans`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ssdtrain.profile.attributes import Attributes

__all__ = ["SameAttributes"]


class SameAttributes:
    """The forward of a block. Each run after the first finds the attributes of its modules as the first one found them, and
    leaves them as they were before that run.

    Args:
        name: of the block, for errors.
        forward: of the block.

    Raises:
        RuntimeError: from a run after the first: a tensor that is an attribute, or a parameter, was changed in place since the
            first one began.
    """

    def __init__(self, name: str, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._name, self._block, self._forward = name, block, forward
        self._first: Attributes | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is None:
            self._first = Attributes(self._block)
            return self._forward(*args, **kwargs)
        changed = self._first.changed_in_place()
        if changed:
            raise RuntimeError(
                f"ssdtrain.plan: {changed} of the block {self._name!r} was changed in place since the block's "
                "forward began, and a second run would compute by the change: change it after backward or by an operation that "
                'is not in place, leave the block out of plan.blocks, or set plan.recompute to "off"'
            )
        now = Attributes(self._block)
        self._first.put_back()
        try:
            return self._forward(*args, **kwargs)
        finally:
            now.put_back()
