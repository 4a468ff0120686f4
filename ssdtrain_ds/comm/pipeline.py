"""Messages between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ssdtrain.comm import Communicator
from ssdtrain_ds import _compat
from ssdtrain_ds.comm.roles import Role, taken

__all__ = ["instructions"]


def instructions(engine: Any, comm: Communicator) -> dict[type, Callable[..., Any]]:
    """The engine's table of instructions, those that send or receive in their role."""
    table = _compat.instruction_map(engine)
    for names, dimension in (
        (("SendActivation", "RecvActivation"), "pp_forward"),
        (("SendGrad", "RecvGrad"), "pp_backward"),
    ):
        for name in names:
            kind = getattr(_compat.schedule, name)
            if kind in table:
                table[kind] = _in_role(table[kind], comm, dimension)
    return table


def _in_role(plain: Callable[..., Any], comm: Communicator, dimension: str) -> Callable[..., Any]:
    def execute(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with taken(Role(comm, dimension, first_only=True)):
            return plain(engine, *args, **kwargs)

    return execute
