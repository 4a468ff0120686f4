"""Activations to the next pipeline stage, and their gradients to the one before.

Note: [Payloads in the place of tensors]
    Megatron's two functions for these messages (one batched, one that orders them by even and odd stages) get payloads instead of
    the tensors, so that order, groups and streams stay theirs; what they return is waited for before a payload is decoded. A
    tensor that is sent may be freed as soon as they return (deallocate_pipeline_outputs): its payload is memory of its own, and
    what may be needed after it (see `ssdtrain.comm.overflow`) is kept by a reference of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ssdtrain.comm import Communicator
from ssdtrain.integration.patching import Function

# What Megatron's functions call their tensors -> (what is sent, the peer's argument), in the order in which they issue them.
_MESSAGES = {
    "tensor_send_prev": ("pp_backward", "prev_pipeline_rank"),
    "tensor_recv_prev": ("pp_forward", "prev_pipeline_rank"),
    "tensor_send_next": ("pp_forward", "next_pipeline_rank"),
    "tensor_recv_next": ("pp_backward", "next_pipeline_rank"),
}


class _Message:
    """One tensor's payload, in the place of a tensor of Megatron's call."""

    def __init__(self) -> None:
        self.payload: Tensor | None = None
        self.carried: Any = None
        """The handle of Megatron's call that carries the payload, once there is one."""

    def issue(self, payload: Tensor) -> _Message:
        self.payload = payload
        return self

    def wait(self) -> None:
        if self.carried is not None:
            self.carried.wait()
            self.carried = None


class Pipeline:
    """Replacements of Megatron's functions for messages between stages."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def batched(self, plain: Function) -> Function:
        """Replace `_batched_p2p_ops`, which returns a list of handles."""

        def batched_p2p_ops(**arguments: Any) -> Any:
            coded = self._code(arguments)
            requests = plain(**arguments)
            # Whoever waits for all of them in order has received every payload when these are waited for.
            return [*requests, *(work for _, work in coded.values())] if coded else requests

        return batched_p2p_ops

    def ordered(self, plain: Function) -> Function:
        """Replace `_p2p_ops`, which returns handles by name: "send_next" and so on."""

        def p2p_ops(**arguments: Any) -> Any:
            coded = self._code(arguments)
            requests = plain(**arguments)
            for argument, (message, work) in coded.items():
                name = argument.removeprefix("tensor_")
                message.carried = requests.get(name)
                requests[name] = work
            return requests

        return p2p_ops

    def _code(self, arguments: dict[str, Any]) -> dict[str, tuple[_Message, Any]]:
        """Put payloads in the place of tensors in `arguments`; what was coded, by argument, with its handle."""
        coded: dict[str, tuple[_Message, Any]] = {}
        for argument, (dimension, peer_argument) in _MESSAGES.items():
            tensor, peer = arguments[argument], arguments[peer_argument]
            if tensor is None:
                continue
            message, through = _Message(), self._comm.point_to_point
            verb = through.send if "send" in argument else through.receive
            work = verb(tensor, dimension, peer, message.issue)
            if work is None:
                continue
            arguments[argument] = message.payload
            coded[argument] = message, work
        return coded
