"""Trackers of random states that torch's checkpoint knows nothing of, wherever they are in this process.

Libraries with tensor parallelism draw some dropout masks from states that a tracker puts into the device's generator for a
moment. Each library, and each fork of one, has a tracker of its own, which its module returns by a function of one name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ssdtrain.offload.checkpoint import checkpoint

__all__ = ["register_trackers"]

_FUNCTION = "get_cuda_rng_tracker"


def register_trackers() -> str:
    """Restore the states of every tracker that an imported module has, for every recomputation by `ssdtrain.checkpoint` and the
    checkpoint functions made from it. They stay registered: blocks that exist may be recomputed later.

    Returns:
        Why blocks must not be recomputed, as a clause: states of a tracker cannot be restored; "": all can be.
    """
    for name, function in _functions().items():
        try:
            tracker = function()
            states = dict(tracker.get_states())
            restorable = callable(tracker.set_states)
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"the random states of {name} cannot be read ({type(error).__name__}: {error})"
        # Generators for CUDA graphs are shared with the device's: what forward advanced cannot be put back by handing them in.
        shared = getattr(tracker, "use_cudagraphable_rng", False)
        if shared or not restorable or not all(isinstance(state, torch.Tensor) for state in states.values()):
            return f"the random states of {name} are no tensors (generators for CUDA graphs), which cannot be restored"
        checkpoint.register_tracker(name, function)
    return ""


def _functions() -> dict[str, Callable[[], Any]]:
    """What returns the trackers, by module and name. Modules that import one by name have the same function."""
    found: dict[str, Callable[[], Any]] = {}
    for module in list(sys.modules.values()):
        function = vars(module).get(_FUNCTION) if isinstance(module, ModuleType) else None
        if callable(function) and function not in found.values():
            home = getattr(function, "__module__", None) or module.__name__
            name = f"{home}.{_FUNCTION}"
            found[name if name not in found else f"{module.__name__}.{_FUNCTION}"] = function
    return found
