"""Tracks the qualified names of the running modules."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from ssdtrain.profile.time_spans import Spans

_WRAPPER = "module."
"""Prefix that data-parallel and mixed-precision wrappers add to qualified names."""


def plain_name(name: str) -> str:
    """A qualified name without the prefixes of wrappers."""
    while name.startswith(_WRAPPER):
        name = name[len(_WRAPPER) :]
    return name


class Running(NamedTuple):
    """A module whose forward is running: its qualified name and the name of its class."""

    name: str
    kind: str


class _Thread(threading.local):
    """What runs on this thread."""

    stack: tuple[Running, ...] = ()
    began: tuple[tuple[Running, Spans, float], ...] = ()


class ModuleNames:
    """Tracks the stack of running modules per thread, with forward hooks on the modules of watched models. Another thread may set
    `spans` meanwhile.

    The hooks have no effect on the model and are skipped in compiled code, where names are unknown. A module recomputed in
    backward is on the stack of the recomputing thread.
    """

    def __init__(self) -> None:
        self._local = _Thread()
        self._removals: list[Callable[[], None]] = []
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models
        self._owners: set[object] = set()
        self.watching = False
        """Whether hooks are in place."""
        self.spans: Spans | None = None
        """Gets the forward of each module as a span; None: not recorded."""

    @property
    def stack(self) -> tuple[Running, ...]:
        """The running modules of this thread, outermost first."""
        return self._local.stack

    def watch(self, model: nn.Module, owner: object = None) -> None:
        """Track the modules of `model` until each owner that watches a model has called `close`. A model that is watched already
        gets no second hooks."""
        self._owners.add(owner)
        if model in self._watched:
            return
        self._watched.add(model)
        self.watching = True
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks
            running = Running(plain_name(name), type(module).__name__)
            before = module.register_forward_pre_hook(ModuleHook(self.enter, running), prepend=True)
            after = module.register_forward_hook(ModuleHook(self.leave, running), always_call=True)
            self._removals += [before.remove, after.remove]

    def enter(self, running: Running, *_: object) -> None:
        """The forward of a module begins.

        One that is on the stack already was left there by an interrupt (Ctrl-C), after which torch calls no hooks: it goes, and
        all that ran inside of it.
        """
        if not torch.compiler.is_compiling():
            self._local.stack = (*self._below(running), running)
            if (spans := self.spans) is not None:
                began = spans.opened(running.name)
                self._local.began = (*self._open(spans), (running, spans, began))

    def leave(self, running: Running, *_: object) -> None:
        """The forward of a module is over, and all that ran inside of it."""
        if not torch.compiler.is_compiling():
            self._local.stack = self._below(running)
            if (spans := self.spans) is not None:
                self._end(running, spans)

    def _open(self, spans: Spans) -> tuple[tuple[Running, Spans, float], ...]:
        """What has begun on this thread and not ended; not what an earlier recording left."""
        return tuple(one for one in self._local.began if one[1] is spans)

    def _end(self, running: Running, spans: Spans) -> None:
        found = self._open(spans)
        for index, (known, _, began) in enumerate(found):
            if known is running:
                spans.closed("module", running.name or running.kind, began)
                self._local.began = found[:index]
                return

    def _below(self, running: Running) -> tuple[Running, ...]:
        stack = self.stack
        for index, known in enumerate(stack):
            if known is running:
                return stack[:index]
        return stack

    def close(self, owner: object = None) -> None:
        """This owner needs no names any more: the hooks of all models go with the last one."""
        self._owners.discard(owner)
        if self._owners:
            return
        self._watched.clear()
        self.watching = False
        while self._removals:
            self._removals.pop()()
        self._local.stack = ()  # no hook is left to take a running module off


class ModuleHook:
    """A hook of modules that calls a function. Copied or pickled as a hook without effect, which is found without this package.

    Args:
        function: gets `first`, then what a hook gets.
    """

    def __init__(self, function: Callable[..., object], *first: Any) -> None:
        self._function, self._first = function, first

    def __call__(self, *arguments: Any) -> None:
        self._function(*self._first, *arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` has made anything of the model or a module inside of it, which hooks would have compiled again."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def matches(stack: tuple[Running, ...], patterns: tuple[str, ...]) -> bool:
    """Whether the name or class of a running module matches a pattern.

    Args:
        patterns: shell patterns of qualified names ("*.mlp", "layers.0.*") or names of classes ("LayerNorm"). With "=" in front
            the innermost module alone is looked at.
    """
    return any(
        fnmatchcase(module.name, plain) or fnmatchcase(module.kind, plain)
        for pattern in patterns
        for plain in (pattern.removeprefix("="),)
        for module in (stack[-1:] if pattern.startswith("=") else stack)
    )
