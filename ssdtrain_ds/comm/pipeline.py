"""Messages between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ssdtrain.comm import Communicator
from ssdtrain_ds import _compat
from ssdtrain_ds.comm.traffic import Traffic, traffic_scope

__all__ = ["instructions"]


def instructions(comm: Communicator, plain: dict[type, Callable[..., Any]]) -> dict[type, Callable[..., Any]]:
    """An engine's table of instructions, those that send or receive in their traffic."""
    table = dict(plain)
    for names, dimension in (
        (("SendActivation", "RecvActivation"), "pp_forward"),
        (("SendGrad", "RecvGrad"), "pp_backward"),
    ):
        for name in names:
            kind = getattr(_compat.schedule, name)
            if kind in table:
                table[kind] = _in_scope(table[kind], comm, dimension)
    return table


def _in_scope(plain: Callable[..., Any], comm: Communicator, dimension: str) -> Callable[..., Any]:
    def execute(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with traffic_scope(Traffic(comm, dimension, first_only=True)):
            return plain(engine, *args, **kwargs)

    return execute
