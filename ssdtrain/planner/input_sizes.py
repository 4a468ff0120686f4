"""Sizes of what models are called with: a sign of how much their forwards save that needs no saved-tensor hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ssdtrain.profile.containers import leaves
from ssdtrain.profile.modules import no_hook

__all__ = ["InputSizes"]

LARGER = 1.2
"""Factor by which inputs have grown where the method is called."""


class InputSizes:
    """Calls a method before a forward with gradients whose inputs are larger by a fifth than those of the first forward, or than
    those of the latest call.

    Args:
        grew: a bound method; its object is not kept alive.
    """

    def __init__(self, grew: Callable[[], object]) -> None:
        self._grew = weakref.WeakMethod(grew)
        self._known: dict[int, int] = {}  # bytes, by number of the model
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Watch the calls of `model` too, unless they are compiled: a ScriptModule takes no hooks."""
        if isinstance(model, torch.jit.ScriptModule):
            return
        hook = _BeforeForward(self, len(self._handles))
        self._handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))

    def called(self, number: int, arguments: Any) -> None:
        """The model of this number is called."""
        tensors = (leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
        nbytes = sum(
            tensor.numel() * tensor.element_size() for tensor in tensors
        )  # `nbytes` raises of a sparse one
        if nbytes <= LARGER * self._known.get(number, 0):
            return
        self._known[number] = nbytes
        if (grew := self._grew()) is not None:
            grew()

    def remove(self) -> None:
        """Watch no model any more. Idempotent."""
        while self._handles:
            self._handles.pop().remove()


class _BeforeForward:
    """Copied or pickled as a hook without effect."""

    def __init__(self, sizes: InputSizes, number: int) -> None:
        self.sizes, self.number = sizes, number

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.sizes.called(self.number, (args, kwargs))

    def __reduce__(self) -> Any:
        return no_hook()
