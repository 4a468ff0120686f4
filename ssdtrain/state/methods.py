"""Functions that stand in the place of methods of an optimizer, and keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer

from ssdtrain.state.sizes import plain_step

if TYPE_CHECKING:
    from ssdtrain.state.optimizer import ChunkedOptimizer

__all__ = ["METHODS", "method_of"]

METHODS = {
    "step": "step",
    "state_dict": "state_dict",
    "load_state_dict": "load_state_dict",
    "__getstate__": "refuse_to_be_copied",
}
"""Methods of an optimizer, and those of `ChunkedOptimizer` in their place."""


def method_of(chunked: ChunkedOptimizer, name: str) -> Callable[..., Any]:
    """A function for the optimizer, which calls `chunked`, or the class's own method where that is gone or removed."""
    reference = weakref.ref(chunked)
    kind = type(chunked.optimizer)

    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is None or not found._installed:
            plain = plain_step(kind) if name == "step" else getattr(kind, name)
            return plain(optimizer, *args, **kwargs)
        return getattr(found, METHODS[name])(*args, **kwargs)

    call.__name__ = name
    return call
