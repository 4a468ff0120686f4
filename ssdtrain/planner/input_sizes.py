"""Sizes of what models are called with: a sign of how much their forwards save that needs no saved-tensor hooks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ssdtrain.profile.containers import leaves
from ssdtrain.profile.modules import no_hook

__all__ = ["InputSizes"]

LARGER = 1.2
"""Factor by which inputs have grown where the method is called."""

_RECENT = 16
"""Number of latest calls of a module whose largest inputs are what others are compared with from `settle` on."""


class InputSizes:
    """Calls a method before a forward with gradients whose inputs are larger by a fifth than those of the first forward, of the
    latest call of the method, or of the forwards before `settle`.

    Args:
        grew: a bound method; its object is not kept alive.
    """

    def __init__(self, grew: Callable[[], object]) -> None:
        self._grew = weakref.WeakMethod(grew)
        # Bytes.
        self._known: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._recent: weakref.WeakKeyDictionary[nn.Module, deque[int]] = weakref.WeakKeyDictionary()
        self.blind = False
        """Whether a call had no tensor that is found: in an object of the program's own."""
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Watch the calls of `model` too, unless they are compiled: a ScriptModule takes no hooks."""
        if isinstance(model, torch.jit.ScriptModule):
            return
        self._handles.append(model.register_forward_pre_hook(_BeforeForward(self), with_kwargs=True))

    def called(self, module: nn.Module, arguments: Any) -> None:
        """Compare the size of what a module is called with."""
        tensors = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
        self.blind |= not tensors
        nbytes = sum(
            tensor.numel() * tensor.element_size() for tensor in tensors
        )  # `nbytes` raises of a sparse one
        self._recent.setdefault(module, deque(maxlen=_RECENT)).append(nbytes)
        if nbytes <= LARGER * self._known.get(module, 0):
            return
        self._known[module] = nbytes
        if (grew := self._grew()) is not None:
            grew()

    def settle(self) -> None:
        """Compare with the latest calls from now on: larger ones of before are over."""
        for module, recent in self._recent.items():
            self._known[module] = max(recent)

    def remove(self) -> None:
        """Watch no model any more. Idempotent."""
        while self._handles:
            self._handles.pop().remove()


class _BeforeForward:
    """Sees what a framework calls, whose forward is being recorded then: hooks are on from the next one. Copied or pickled as a
    hook without effect."""

    def __init__(self, sizes: InputSizes) -> None:
        self.sizes = sizes

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.sizes.called(module, (args, kwargs))

    def __reduce__(self) -> Any:
        return no_hook()
