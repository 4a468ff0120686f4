"""What autograd sees: a context in which saved tensors go to a tape."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.functorch import PackHook, StepAside, disabled_because, warn_once
from ssdtrain.offload.tensors.tape import Tape

__all__ = ["SavedTensorRecorder"]


def _without_dynamo(hook: Any) -> Any:
    """`hook`, which Dynamo leaves alone; it is also called in functions that a compiled one calls as they are."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


class SavedTensorRecorder:
    """A context manager: what is saved for backward inside goes to `tape`.

    Hooks are installed for the thread that enters. Hooks that others install inside take precedence, as in autograd: only the
    innermost pair is called. Where they are disabled (also by torch.func.grad, vjp, jacrev, hessian) none are installed, and the
    tape stays empty; where they become disabled inside, they step aside for as long.
    """

    def __init__(self, engine: OffloadEngine, tape: Tape) -> None:
        self.engine = engine
        self.tape = tape
        pack, unpack = _without_dynamo(engine.pack), _without_dynamo(engine.unpack)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(PackHook(pack, tape), unpack)
        self._aside = StepAside()
        self._installed = False

    def __enter__(self) -> Tape:
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
        self.engine.finish_forward(self.tape, complete=kind is None)
