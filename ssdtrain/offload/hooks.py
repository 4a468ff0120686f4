"""What autograd sees: a context in which saved tensors go to a tape."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.functorch import (
    PackHook,
    StepAside,
    disabled_because,
    dynamo_leaves_alone,
    top_hooks,
    warn_once,
)
from ssdtrain.offload.tensors.region import Handle, Kept
from ssdtrain.offload.tensors.tape import Tape


class _Recorders(threading.local):
    """The recorder of this thread's innermost forward."""

    current: SavedTensorRecorder | None = None


_recorders = _Recorders()


def current_recorder() -> SavedTensorRecorder | None:
    """Return the recorder of the innermost forward of this thread; None: none is recorded."""
    return _recorders.current


class HeldTensor:
    """A tensor that others hold for backward by means of their own, and whose bytes may have left memory."""

    __slots__ = ("engine", "handle")

    def __init__(self, engine: OffloadEngine, handle: Handle) -> None:
        self.engine = engine
        self.handle = handle

    def value(self) -> torch.Tensor:
        """Return the tensor, on the device it came from. Raises what `OffloadEngine.unpack` raises."""
        return self.engine.unpack(self.handle)


def hold(engine: OffloadEngine, tape: Tape, tensor: torch.Tensor) -> HeldTensor | None:
    """Offload a tensor that autograd does not save; None: it has to stay."""
    if tensor.is_inference():
        return None  # it has no version counter: a write to it would not be noticed
    handle = engine.pack(tape, tensor)
    return None if isinstance(handle, Kept) else HeldTensor(engine, handle)


class SavedTensorRecorder:
    """A context manager: what is saved for backward inside goes to `tape`.

    Hooks are installed for the thread that enters. Hooks that others install inside take precedence, as in autograd: only the
    innermost pair is called. Where they are disabled (also by torch.func.grad, vjp, jacrev, hessian) none are installed, and the
    tape stays empty; where they become disabled inside, they step aside for as long.

    Attributes:
        hooks: pack and unpack, as `saved_tensors_hooks` takes them.
        around: the hooks that autograd called before it was entered; None: there are none, or this torch does not tell.
    """

    def __init__(self, engine: OffloadEngine, tape: Tape) -> None:
        self.engine = engine
        self.tape = tape
        pack, unpack = dynamo_leaves_alone((engine.pack, engine.unpack))
        self.hooks: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] = (
            PackHook(pack, tape),
            unpack,
        )
        self._hooks = torch.autograd.graph.saved_tensors_hooks(*self.hooks)
        self._aside = StepAside()
        self._installed = False
        self._outer: SavedTensorRecorder | None = None
        self.around: Any = None

    def __enter__(self) -> Tape:
        self._outer, _recorders.current = _recorders.current, self
        self.around = top_hooks()
        reason = disabled_because()
        if reason is None:
            self._aside.__enter__()
            self._hooks.__enter__()
            self._installed = True
        else:
            warn_once(reason)
        self.engine.begin_forward(self.tape)
        return self.tape

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            self._installed = False
            self._hooks.__exit__(kind, error, trace)
            self._aside.__exit__(kind, error, trace)
        _recorders.current, self._outer = self._outer, None
        self.engine.finish_forward(self.tape, complete=kind is None)
