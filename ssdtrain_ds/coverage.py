"""Saved-tensor hooks that a model installs inside of ours.

Autograd calls only the innermost pair: what those hooks take is not offloaded. That is intended (torch's checkpoint recomputes
by such hooks), but of a model that wraps itself in `save_on_cpu` nothing would be offloaded, silently. So during the first steps
the hooks installed inside a forward are recorded, with the bytes that they take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.integration.patching import Patches
from ssdtrain.offload.engine import OffloadEngine

__all__ = ["InnerHooks"]

# Recomputation: nothing is lost, the block's inputs are offloaded instead.
_RECOMPUTING = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing")


class _Watchers(threading.local):
    """Who watches this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[InnerHooks] = []


_watchers = _Watchers()


def _noting(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    def enter(hooks: Any) -> None:
        if _watchers.stack:
            _watchers.stack[-1]._watch(hooks)
        plain(hooks)

    return enter


class InnerHooks:
    """Counts what hooks nested inside a forward take, by who installed them.

    Args:
        min_bytes: smaller tensors would not have been offloaded anyway.

    Attributes:
        taken: bytes by the qualified name of the pack hook, recomputation left out.
    """

    def __init__(self, min_bytes: int) -> None:
        self.taken: dict[str, int] = {}
        self._min_bytes = min_bytes

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch this thread inside one forward."""
        patches = Patches()
        patches.replace(saved_tensors_hooks, "__enter__", _noting)
        _watchers.stack.append(self)
        try:
            yield
        finally:
            _watchers.stack.pop()
            patches.undo()

    def _watch(self, hooks: Any) -> None:
        pack: Callable[[torch.Tensor], Any] = hooks.pack_hook
        if getattr(pack, "__module__", "") in _RECOMPUTING or hasattr(pack, "watches"):
            return
        if isinstance(getattr(getattr(pack, "func", None), "__self__", None), OffloadEngine):
            return  # another engine's forward inside this one
        name = f"{type(hooks).__module__}.{type(hooks).__qualname__}"
        if type(hooks) is saved_tensors_hooks:
            name = f"{getattr(pack, '__module__', '?')}.{getattr(pack, '__qualname__', repr(pack))}"

        def counting(tensor: torch.Tensor) -> Any:
            # Sparse tensors have no `nbytes`, and would not have been offloaded either.
            strided = tensor.layout is torch.strided and not isinstance(tensor, torch.nn.Parameter)
            if strided and tensor.nbytes >= self._min_bytes:
                self.taken[name] = self.taken.get(name, 0) + tensor.nbytes
            return pack(tensor)

        counting.watches = pack  # type: ignore[attr-defined]
        hooks.pack_hook = counting

    def report(self, steps: int) -> str | None:
        """One line about what is lost, or None."""
        if not self.taken:
            return None
        parts = ", ".join(
            f"{name} takes {nbytes // steps} bytes a step" for name, nbytes in sorted(self.taken.items())
        )
        return f"saved-tensor hooks inside the model take precedence, and what they take is not offloaded: {parts}"
