"""Trackers of random states that torch's checkpoint knows nothing of, wherever they are in this process.

Libraries with tensor parallelism draw some dropout masks from states that a tracker puts into the device's generator for a
moment. Each library, and each fork of one, has a tracker of its own, which its module returns by a function of one name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ssdtrain.offload.checkpoint import checkpoint

_FUNCTION = "get_cuda_rng_tracker"

_MADE = "_CUDA_RNG_STATE_TRACKER_INITIALIZED"
"""Where a module's function makes the tracker at its first call, with options of its own choice: False until a seed makes it."""


class _NotRestorable(RuntimeError):
    """Has why, as a clause."""


def register_trackers() -> str:
    """Restore the states of every tracker that an imported module has, for every recomputation by `ssdtrain.checkpoint` and the
    checkpoint functions made from it. They stay registered: blocks that exist may be recomputed later. A tracker that is made or
    seeded later is read from then on; where its states cannot be restored, a recomputed block raises RuntimeError in its forward.

    Returns:
        Why blocks must not be recomputed, as a clause: states of a tracker cannot be restored; "": all can be.
    """
    for name, function in _functions().items():
        tracker = functools.partial(_tracker, name, function)
        try:
            tracker()
        except _NotRestorable as error:
            return str(error)
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"the random states of {name} cannot be read ({type(error).__name__}: {error}){_REMEDY}"
        checkpoint.register_tracker(name, tracker)
    return ""


_REMEDY = ': set plan.recompute to "off", or give the library a tracker without CUDA graphs'


def _tracker(name: str, function: Callable[[], Any]) -> Any:
    """What `function` returns; None where that is not made yet.

    Raises:
        _NotRestorable: its states cannot be restored.
    """
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is not None and not vars(home).get(_MADE, True):
        return None
    tracker = function()
    states = dict(tracker.get_states())
    # Generators for CUDA graphs are shared with the device's: what forward advanced cannot be put back by handing them in.
    shared = getattr(tracker, "use_cudagraphable_rng", False) or not callable(tracker.set_states)
    if shared or not all(isinstance(state, torch.Tensor) for state in states.values()):
        raise _NotRestorable(
            f"the random states of {name} are no tensors (generators for CUDA graphs), which cannot be restored{_REMEDY}"
        )
    return tracker


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
