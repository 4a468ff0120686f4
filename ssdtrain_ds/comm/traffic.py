"""What a collective is about: a scope around the code that issues it, and the choke point where it counts.

Note: [Choke point]
    All of DeepSpeed's collectives pass the methods of one class (`TorchBackend`). While something is attached, those that can be
    compressed look for the current traffic, and without one do what they always did. It is a context variable: one thread's, and
    gone at the end of its scope, so that a norm or an overflow flag never meets a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ssdtrain.comm import Bucket, Communicator
from ssdtrain.integration.patching import Patches
from ssdtrain_ds import _compat_comm

__all__ = ["Traffic", "current_traffic", "follow", "traffic_scope"]


class Traffic:
    """What the collectives issued meanwhile carry.

    Args:
        dimension: of `ssdtrain.comm`.
        bucket: of a collective on so many elements of a group, whole or laid out by rank; None where nothing is named.
        first_only: of messages to a pipeline's neighbour only the first floating-point tensor is coded: the hidden states. Others
            are masks and the like.
    """

    __slots__ = ("bucket", "comm", "dimension", "first_only", "sent")

    def __init__(
        self,
        comm: Communicator,
        dimension: str,
        bucket: Callable[[int, Any, bool], Bucket] | None = None,
        first_only: bool = False,
    ) -> None:
        self.comm = comm
        self.dimension = dimension
        self.bucket = bucket
        self.first_only = first_only
        self.sent = 0

    def bucket_of(self, tensor: Tensor, group: Any, by_rank: bool = False) -> Bucket | None:
        return self.bucket(tensor.numel(), group, by_rank) if self.bucket is not None else None

    def next_message(self, tensor: Tensor) -> bool:
        """Whether this tensor to or from a neighbour may be coded."""
        if not self.first_only or not tensor.is_floating_point() or tensor.dim() == 0:
            return not self.first_only
        self.sent += 1
        return self.sent == 1


_current: ContextVar[Traffic | None] = ContextVar("ssdtrain_traffic", default=None)


def current_traffic() -> Traffic | None:
    """The traffic of this thread now."""
    return _current.get()


@contextmanager
def traffic_scope(traffic: Traffic | None) -> Iterator[None]:
    """Collectives of this thread have `traffic` until the end; None: none, whatever is around."""
    token = _current.set(traffic)
    try:
        yield
    finally:
        _current.reset(token)


def _answer(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return None


def _all_reduce(plain: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(
        self: Any, tensor: Tensor, op: Any = _compat_comm.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        traffic = _current.get()
        work = (
            None
            if traffic is None
            else traffic.comm.all_reduce(
                tensor, traffic.dimension, group, _compat_comm.torch_op(op), traffic.bucket_of(tensor, group)
            )
        )
        return plain(self, tensor, op, group, async_op) if work is None else _answer(work, async_op)

    return all_reduce


def _inference_all_reduce(plain: Callable[..., Any]) -> Callable[..., Any]:
    def inference_all_reduce(self: Any, tensor: Tensor, op: Any, group: Any = None) -> Any:
        traffic = _current.get()
        work = (
            None
            if traffic is None
            else traffic.comm.all_reduce(tensor, traffic.dimension, group, _compat_comm.torch_op(op))
        )
        if work is None:
            return plain(self, tensor, op, group)
        work.wait()
        return tensor

    return inference_all_reduce


def _reduce_scatter(plain: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter_tensor(
        self: Any,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = _compat_comm.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        traffic = _current.get()
        work = (
            None
            if traffic is None
            else traffic.comm.reduce_scatter(
                output_tensor,
                input_tensor,
                traffic.dimension,
                group,
                _compat_comm.torch_op(op),
                traffic.bucket_of(input_tensor, group, by_rank=True),
            )
        )
        if work is None:
            return plain(self, output_tensor, input_tensor, op, group, async_op)
        return _answer(work, async_op)

    return reduce_scatter_tensor


def _all_gather(plain: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_into_tensor(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        traffic = _current.get()
        work = (
            None
            if traffic is None
            else traffic.comm.all_gather(
                output_tensor,
                input_tensor,
                traffic.dimension,
                group,
                traffic.bucket_of(output_tensor, group, by_rank=True),
            )
        )
        if work is None:
            return plain(self, output_tensor, input_tensor, group, async_op)
        return _answer(work, async_op)

    return all_gather_into_tensor


def _all_to_all(plain: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(
        self: Any,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        traffic = _current.get()
        work = (
            None
            if traffic is None
            else traffic.comm.all_to_all(
                output, input, traffic.dimension, output_split_sizes, input_split_sizes, group
            )
        )
        if work is None:
            return plain(self, output, input, output_split_sizes, input_split_sizes, group, async_op)
        return _answer(work, async_op)

    return all_to_all_single


def _send(plain: Callable[..., Any]) -> Callable[..., Any]:
    def send(self: Any, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        traffic = _current.get()
        if traffic is not None and traffic.next_message(tensor):
            work = traffic.comm.point_to_point.send(
                tensor, traffic.dimension, dst, lambda payload: plain(self, payload, dst, group, tag)
            )
            if work is not None:
                return _answer(work, False)
        return plain(self, tensor, dst, group, tag)

    return send


def _recv(plain: Callable[..., Any]) -> Callable[..., Any]:
    def recv(self: Any, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        traffic = _current.get()
        if traffic is not None and src is not None and traffic.next_message(tensor):

            def receive(payload: Tensor) -> None:
                plain(self, payload, src, group, tag)

            work = traffic.comm.point_to_point.receive(tensor, traffic.dimension, src, receive)
            if work is not None:
                return _answer(work, False)
        return plain(self, tensor, src, group, tag)

    return recv


_WRAPPERS = {
    "all_reduce": _all_reduce,
    "inference_all_reduce": _inference_all_reduce,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather_into_tensor": _all_gather,
    "all_to_all_single": _all_to_all,
    "send": _send,
    "recv": _recv,
}


def follow(patches: Patches) -> None:
    """Collectives ask for traffic, until `patches` are undone."""
    for name, wrap in _WRAPPERS.items():
        patches.replace(_compat_comm.TorchBackend, name, wrap)
