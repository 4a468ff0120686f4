"""What stands as `model.forward` while a runtime is attached to the model."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

__all__ = ["AttachedForward"]


class AttachedForward:
    """The forward of `model`, where every call with gradients is inside of a context that `record` makes.

    Note: [Copies compute with their own weights]
    It stands in the model's `__dict__`, and so in what a copy of the model is made from. There it gives way to the forward
    that the model had before: a deep copy (an EMA of the weights) and what pickle or torch.save wrote call that, bound to
    themselves, and nothing of a copy is recorded. A shallow copy shares what is in `__dict__`, and so this object.

    Note: [Attached twice]
    Runtimes may be closed in any order: one that is not the outermost takes itself out of the chain. Where somebody else's
    function stands in front of it, it stays and only calls what is behind.
    """

    def __init__(self, model: nn.Module, record: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model = model
        self._record: Callable[[], AbstractContextManager[Any]] | None = record
        own = "forward" in model.__dict__
        functools.update_wrapper(self, model.forward, updated=())
        self._stand_before(model.forward, own)

        def forward(*args: Any, **kwargs: Any) -> Any:
            record = self._record
            if record is None or not torch.is_grad_enabled():
                return self._plain(*args, **kwargs)
            with record():
                return self._plain(*args, **kwargs)

        # Outside of what torch.compile compiles, which goes on inside.
        self._forward = torch.compiler.disable(forward, recursive=False)
        model.forward = self

    def _stand_before(self, plain: Callable[..., Any], own: bool) -> None:
        self._plain = plain
        self._own = own  # it stood in the model's __dict__, not in its class
        self.__wrapped__ = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def detach(self) -> None:
        """Record no more, and put back the forward that was there. See Note: [Attached twice]."""
        self._record = None
        found = self._model.__dict__.get("forward")
        if found is self:
            if self._own:
                self._model.forward = self._plain
            else:
                del self._model.forward
        while isinstance(found, AttachedForward):
            if found._plain is self:
                found._stand_before(self._plain, self._own)
            found = found._plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A bound method is copied bound to the copy of its model.
        return copy.deepcopy(self._plain, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own:
            return operator.getitem, ([self._plain], 0)
        # The reader needs no ssdtrain, and makes the model before it gives it what was in its __dict__.
        return getattr, (self._model, "forward")
