"""Activations to the next pipeline stage, and their gradients to the one before.

Note: [Payloads in the place of tensors]
    Megatron's two functions for these messages (one batched, one that orders them by even and odd stages) get payloads instead of
    the tensors, so that order, groups and streams stay theirs; what they return is waited for before a payload is decoded. A
    tensor that is sent may be freed as soon as they return (deallocate_pipeline_outputs): its payload is memory of its own.

Note: [Messages of unknown size]
    A payload of a lossless codec follows a message with its size, and its receive begins only once that has come. Several such
    messages may be under way between the same two ranks, in both directions of the pipeline, so each has a tag of its own. They
    do not pass through Megatron's functions. Only codecs that work in host memory have them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm import Communicator
from ssdtrain.integration.patching import Function

__all__ = ["Pipeline"]


# What Megatron's functions call their tensors -> (what is sent, the peer's argument), in the order in which they issue them.
_MESSAGES = {
    "tensor_send_prev": ("pp_backward", "prev_pipeline_rank"),
    "tensor_recv_prev": ("pp_forward", "prev_pipeline_rank"),
    "tensor_send_next": ("pp_forward", "next_pipeline_rank"),
    "tensor_recv_next": ("pp_backward", "next_pipeline_rank"),
}
_TAGS = {"pp_forward": 1 << 20, "pp_backward": 1 << 21}
_TAG_ROUND = 1 << 19


class _Message:
    """How one tensor travels: in the place of a tensor of Megatron's call, or by itself."""

    def __init__(self, alone: Callable[[], Function]) -> None:
        self._start_alone = alone
        self._alone: Function | None = None
        self.payload: Tensor | None = None
        self.carried: Any = None
        """The handle of Megatron's call that carries the payload, once there is one."""

    def issue(self, message: Tensor) -> Any:
        """Send or receive as the engine asks; only the size of a payload is an integer."""
        if message.dtype == torch.int64 and self._alone is None:
            self._alone = self._start_alone()
        if self._alone is not None:
            return self._alone(message)
        self.payload = message
        return self

    def wait(self) -> None:
        if self.carried is not None:
            self.carried.wait()
            self.carried = None


class Pipeline:
    """Replacements of Megatron's functions for messages between stages."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._sent_alone: Counter[tuple[str, int, bool]] = Counter()

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
            sends = "send" in argument
            message = _Message(functools.partial(self._alone, dimension, peer, sends, arguments["group"]))
            through = self._comm.point_to_point.send if sends else self._comm.point_to_point.receive
            work = through(tensor, dimension, peer, message.issue)
            if work is None:
                continue
            arguments[argument] = message.payload
            coded[argument] = message, work
        return coded

    def _alone(self, dimension: str, peer: int, sends: bool, group: dist.ProcessGroup) -> Function:
        """Sends or receives the messages of one tensor. See Note: [Messages of unknown size]."""
        way = dimension, peer, sends
        tag = _TAGS[dimension] + self._sent_alone[way] % _TAG_ROUND
        self._sent_alone[way] += 1
        if sends:
            return lambda message: dist.isend(message, peer, group=group, tag=tag)
        return lambda message: dist.irecv(message, peer, group=group, tag=tag)
