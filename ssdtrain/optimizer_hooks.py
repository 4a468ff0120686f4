"""Functions that are called before or after the steps of all optimizers of the process.

Note: [One entry in torch's table]
torch walks its table of global hooks while it calls them, and raises RuntimeError out of `optimizer.step` if the table changes
meanwhile: because another thread attaches or closes a runtime, or because a collection of garbage, which may begin inside of a
hook, frees one. So there is one entry of ours in the table, made at the first use and kept, and it walks a tuple of its own. A
function is removed by one assignment, which is safe in a finalizer too; what it leaves is dropped when another one is added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = ["StepHook", "call_after_steps", "call_before_steps"]

Called = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], object]


class StepHook:
    """A function that is called until `remove`."""

    __slots__ = ("called",)

    def __init__(self, called: Called) -> None:
        self.called: Called | None = called

    def remove(self) -> None:
        """Idempotent; may be called anywhere."""
        self.called = None


class _Table:
    """See Note: [One entry in torch's table].

    Args:
        register: torch's function that adds a global hook.
    """

    def __init__(self, register: Callable[[Callable[..., None]], object]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._hooks: tuple[StepHook, ...] = ()
        self._registered = False

    def add(self, called: Called) -> StepHook:
        hook = StepHook(called)
        with self._lock:
            self._hooks = (*(one for one in self._hooks if one.called is not None), hook)
            if not self._registered:
                self._registered = True
                self._register(self._call)
        return hook

    def _call(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for hook in self._hooks:
            if (called := hook.called) is not None:
                called(optimizer, args, kwargs)


_before, _after = _Table(register_optimizer_step_pre_hook), _Table(register_optimizer_step_post_hook)


def call_before_steps(called: Called) -> StepHook:
    """Call `called(optimizer, args, kwargs)` before each step of any optimizer. What it returns is not used."""
    return _before.add(called)


def call_after_steps(called: Called) -> StepHook:
    """The same after each step."""
    return _after.add(called)
