"""Saved-tensor hooks that a model installs inside of ours.

Autograd calls only the innermost pair: what those hooks take is not offloaded. That is intended (torch's checkpoint recomputes
by such hooks), but of a model that wraps itself in `save_on_cpu` nothing would be offloaded, silently. So during the first steps
the hooks installed inside a forward are recorded, with the bytes that they take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.features import FIRST_STEPS, Feature, Forward, Step
from ssdtrain.integration.patching import Patches
from ssdtrain.offload.functorch import PackHook

__all__ = ["InnerHooks"]

logger = logging.getLogger("ssdtrain")

_watcher: ContextVar[InnerHooks | None] = ContextVar("ssdtrain_inner_hooks", default=None)
"""The watcher of this thread's innermost forward."""


def _noting(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    def enter(hooks: Any) -> None:
        watcher = _watcher.get()
        if watcher is not None:
            watcher._watch(hooks)
        plain(hooks)

    return enter


class InnerHooks(Feature):
    """Counts what hooks nested inside a forward take, by who installed them, and warns of it after the first steps.

    An adapter appends it to `Runtime.features`, behind the one that offloads; `ssdtrain.attach` does.

    Args:
        min_bytes: smaller tensors would not have been offloaded anyway.
        recomputing: modules whose hooks recompute: nothing is lost, as the inputs of the block are offloaded instead.

    Attributes:
        taken: bytes by the qualified name of the pack hook, recomputation left out.
        steps: steps so far.
    """

    def __init__(self, min_bytes: int, *recomputing: str) -> None:
        self.taken: dict[str, int] = {}
        self._min_bytes = min_bytes
        self._recomputing = ("torch.utils.checkpoint", *recomputing)
        self.steps = 0

    def on_forward(self, forward: Forward) -> AbstractContextManager[None] | None:
        return self._watched() if self.steps < FIRST_STEPS else None

    def on_step_end(self, step: Step) -> None:
        self.steps += 1
        if self.steps == FIRST_STEPS and self.taken:
            logger.warning(
                "saved-tensor hooks inside the model take precedence, and what they take is not offloaded: %s",
                ", ".join(
                    f"{name} takes {nbytes // FIRST_STEPS} bytes a step"
                    for name, nbytes in sorted(self.taken.items())
                ),
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        patches = Patches()
        patches.replace(saved_tensors_hooks, "__enter__", _noting)
        token = _watcher.set(self)
        try:
            yield
        finally:
            _watcher.reset(token)
            patches.undo()

    def _watch(self, hooks: Any) -> None:
        pack: Callable[[torch.Tensor], Any] = hooks.pack_hook
        if getattr(pack, "__module__", "") in self._recomputing or hasattr(pack, "watches"):
            return
        if isinstance(pack, PackHook):
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
