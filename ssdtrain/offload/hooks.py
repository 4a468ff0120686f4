"""What autograd sees: a context in which saved tensors go to a tape."""

from __future__ import annotations

import logging
from functools import partial
from types import TracebackType

import torch

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.tape import Tape

__all__ = ["Recording"]

logger = logging.getLogger("ssdtrain")

REFUSED_BY_TORCH = "support saved tensor hooks"
"""Of the error that torch.func.grad, vjp, jacrev and hessian raise where there are any."""
WAY_OUT = (
    "The saved-tensor hooks are those of ssdtrain, which offloads this forward. torch.autograd.grad(..., create_graph=True) and "
    "torch.autograd.functional do the same and are offloaded; or leave out of what is offloaded the part of the model that "
    "uses torch.func (ssdtrain.attach on other modules)."
)


class Recording:
    """A context manager: what is saved for backward inside goes to `tape`.

    Hooks are installed for the thread that enters. Hooks that somebody installs inside win, as autograd has it: only the
    innermost pair is called.
    """

    def __init__(self, engine: OffloadEngine, tape: Tape) -> None:
        self.engine = engine
        self.tape = tape
        self._hooks = torch.autograd.graph.saved_tensors_hooks(partial(engine.pack, tape), engine.unpack)

    def __enter__(self) -> Tape:
        self._hooks.__enter__()
        return self.tape

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self.engine.finish_forward(self.tape, complete=kind is None)
        if isinstance(error, RuntimeError) and REFUSED_BY_TORCH in str(error):
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(WAY_OUT)
            else:
                logger.error(WAY_OUT)
