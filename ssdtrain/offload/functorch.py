"""Lets a program disable saved-tensor hooks inside of an offloaded forward, as torch.func.grad, vjp, jacrev and hessian do.

`torch.autograd.graph.disable_saved_tensors_hooks` raises where hooks are installed. Hooks that offload or recompute change
nothing of what is computed, so they are taken off meanwhile, and what is saved then stays in memory. Other hooks are left to
torch. While no forward is recorded, torch's own function is in its place. Where torch does not tell whose hooks are installed
(2.6), nothing is replaced, and torch refuses these transforms by its own error.

Note: [Transforms in a compiled function]
Taking hooks off is a graph break. Dynamo would compile the functions that the transform then calls one by one, torch's own and
`typing.cast` among them, and fails where they get a tensor of the transform (torch 2.11: `AssertionError: False != True`). So the
transform runs without Dynamo; a compiled function that is called in it is compiled as ever.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch

from ssdtrain.storage import make_signal_safe_lock

logger = logging.getLogger("ssdtrain")

modes = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are active on this thread."""
without_modes = torch._C._DisableTorchDispatch
"""A context manager: what is called inside passes by them."""

disabled_because: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)
"""Returns what whoever disabled saved-tensor hooks on this thread says of it; None: they may be installed."""

CAN_STEP_ASIDE = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""This torch tells whose saved-tensor hooks are installed."""

_set_compiler = torch._C._dynamo.eval_frame.set_eval_frame
"""Makes Dynamo look at the functions that this thread calls, by the given callback, or not (None); returns what was set."""

_get_compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
compiler: Callable[[], object] = _get_compiler or (lambda: None)
"""Returns what `_set_compiler` was given. See `dynamo_leaves_alone`."""

_lock = make_signal_safe_lock()
_recorders = 0
_torchs = torch.autograd.graph.disable_saved_tensors_hooks
# What stood there when the first recorder came. A function that replaced ours may call it, so it is put back and never called.
_replaced: Any = None


def tracing() -> bool:
    """Return True while `make_fx` records what is called: what is saved then belongs to the graph that it builds."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


class PackHook(partial[Any]):
    """The pack hook of a recorder, distinguishable from all others."""


@lru_cache(maxsize=8)
def warn_once(reason: str) -> None:
    """Log that a part of a forward is not offloaded.

    Args:
        reason: what whoever disabled saved-tensor hooks says of it.
    """
    logger.warning(
        "saved-tensor hooks are disabled in a part of the forward (torch.autograd.graph.disable_saved_tensors_hooks; "
        "torch.func.grad, vjp, jacrev and hessian call it): what is saved there stays in memory, and is not recomputed (%s)",
        reason,
    )


def _after_fork() -> None:
    """Replace the lock in a child: the thread that held it may be one of the parent's, which will never release it."""
    global _lock
    _lock = make_signal_safe_lock()


os.register_at_fork(after_in_child=_after_fork)


def dynamo_leaves_alone(hooks: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the bound methods `hooks` as Dynamo does not compile them, where a function that a compiled one calls as it is saves
    tensors. `torch.compiler.disable` takes longer than all the questions that the pack hook asks of a tensor. So the frames of
    the methods themselves are skipped, which ask for `compiler` first and call on by `without_compiler`."""
    if "torch._dynamo" not in sys.modules:
        return hooks
    if _get_compiler is None:  # torch 2.6
        return torch.compiler.disable(hooks[0]), torch.compiler.disable(hooks[1])
    for hook in hooks:
        _skip(hook.__func__)
    _skip(without_compiler)
    return hooks


@lru_cache(maxsize=16)
def _skip(function: Any) -> None:
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def without_compiler(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call `hook`, in which Dynamo looks at nothing."""
    before = _set_compiler(None)
    try:
        return hook(*arguments)
    finally:
        _set_compiler(before)


class StepAside:
    """A context manager for the time that a recorder's hooks are installed."""

    def __enter__(self) -> None:
        global _recorders, _replaced
        if not CAN_STEP_ASIDE:
            return
        with _lock:
            if _recorders == 0:
                _replaced = torch.autograd.graph.disable_saved_tensors_hooks
                torch.autograd.graph.disable_saved_tensors_hooks = _disable_without_ours
            _recorders += 1

    def __exit__(self, *_: object) -> None:
        global _recorders
        if not CAN_STEP_ASIDE:
            return
        with _lock:
            _recorders -= 1
            if _recorders == 0 and torch.autograd.graph.disable_saved_tensors_hooks is _disable_without_ours:
                torch.autograd.graph.disable_saved_tensors_hooks = _replaced


@contextmanager
def _disable_without_ours(error_message: str) -> Iterator[None]:
    taken = []
    while (hooks := top_hooks()) is not None and isinstance(hooks[0], PackHook):
        taken.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if taken:
        warn_once(error_message)
    compiler = _set_compiler(None) if taken else None  # see Note: [Transforms in a compiled function]
    try:
        with _torchs(error_message):
            yield
    finally:
        if taken:
            _set_compiler(compiler)
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def top_hooks() -> Any:
    """Return the saved-tensor hooks that autograd calls on this thread; None: there are none, or this torch does not tell."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) if CAN_STEP_ASIDE else None


@contextmanager
def replaced_hooks(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> Iterator[None]:
    """Have autograd call these hooks, which step aside like a recorder's, in the place of `top_hooks`."""
    replaced = top_hooks()
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(PackHook(pack), unpack)
    try:
        with StepAside():
            yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(*replaced)
