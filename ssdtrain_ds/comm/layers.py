"""Tensor parallelism (AutoTP) and experts: autograd functions of DeepSpeed's layers.

They belong to no engine. The communicator is that of the engine that was attached last; with several engines of different
policies in one process, layers of all of them follow it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ssdtrain.comm import Communicator
from ssdtrain.integration.patching import Patches
from ssdtrain_ds import _compat_comm
from ssdtrain_ds.comm.traffic import Traffic, traffic_scope

__all__ = ["follow", "leave"]

_attached: list[Communicator] = []


def _in_scope(dimension: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        with traffic_scope(Traffic(_attached[-1], dimension) if _attached else None):
            return plain(*args, **kwargs)

    return function


_in_tp, _in_ep = functools.partial(_in_scope, "tp"), functools.partial(_in_scope, "ep")


def follow(patches: Patches, comm: Communicator) -> None:
    """Layers use `comm` until `patches` are undone and `leave` is called."""
    _attached.append(comm)
    for functions, wrap in (
        (_compat_comm.tensor_parallel_functions(), _in_tp),
        (_compat_comm.expert_functions(), _in_ep),
    ):
        for function in functions:
            patches.replace(function, "forward", wrap)
            patches.replace(function, "backward", wrap)


def leave(comm: Communicator) -> None:
    """The engine of `comm` is gone."""
    if comm in _attached:
        _attached.remove(comm)
