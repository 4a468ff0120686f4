"""Tensor parallelism (AutoTP) and experts: autograd functions of DeepSpeed's layers.

They belong to no engine. The communicator is that of the engine that was attached last; with several engines of different
policies in one process, layers of all of them follow it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ssdtrain.comm import Communicator
from ssdtrain_ds import _compat_comm
from ssdtrain_ds.comm.traffic import Traffic, traffic_scope

__all__ = ["install", "remove"]

_attached: list[Communicator] = []
_plain: list[tuple[type, str, Callable[..., Any]]] = []


def _in_scope(plain: Callable[..., Any], dimension: str) -> Callable[..., Any]:
    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        with traffic_scope(Traffic(_attached[-1], dimension) if _attached else None):
            return plain(*args, **kwargs)

    return function


def install(comm: Communicator) -> None:
    """Layers use `comm` until `remove`."""
    _attached.append(comm)
    try:
        if len(_attached) == 1:
            for function in _compat_comm.tensor_parallel_functions():
                _wrap(function, "tp")
            for function in _compat_comm.expert_functions():
                _wrap(function, "ep")
    except BaseException:
        remove(comm)
        raise


def _wrap(function: type, dimension: str) -> None:
    for name in ("forward", "backward"):
        plain = getattr(function, name)
        _plain.append((function, name, plain))
        setattr(function, name, staticmethod(_in_scope(plain, dimension)))


def remove(comm: Communicator) -> None:
    """Undo `install`."""
    _attached.remove(comm)
    if not _attached:
        for function, name, plain in _plain:
            setattr(function, name, staticmethod(plain))
        _plain.clear()
