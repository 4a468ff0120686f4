"""What the collectives of a framework carry.

Note: [Traffic scopes]
    Where a tensor and a group do not determine what a collective carries, the code that issues it does: a scope around that code
    sets the current traffic, and an adapter's `classify` returns it. It is a context variable: one thread's, and gone at the end
    of its scope, so that a norm or an overflow flag is never compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ssdtrain.comm import Bucket, Communicator
from ssdtrain.integration.patching import Wrap, run_inside

BucketOf = Callable[[int, Any, bool], Bucket]
"""(elements, process group, whether they are laid out by rank) of a collective's whole tensor -> what is in it."""


class Traffic:
    """What collectives carry.

    Args:
        comm: compresses them.
        dimension: of parallelism, as in the `comm` section of the config.
        bucket: the gradients or weights in a collective; None where they have no name, as activations.
        delta: all-gathers are of weights after a step, and sent as differences from the last ones.
        uncompressed: the reason for which they are sent uncompressed; counted, and written to the log once.
        first_only: of messages to a neighbour only the first floating-point tensor is compressed: the hidden states. Others are
            masks and the like.
    """

    __slots__ = ("bucket", "comm", "delta", "dimension", "first_only", "sent", "uncompressed")

    def __init__(
        self,
        comm: Communicator,
        dimension: str,
        bucket: Bucket | BucketOf | None = None,
        *,
        delta: bool = False,
        uncompressed: str | None = None,
        first_only: bool = False,
    ) -> None:
        self.comm = comm
        self.dimension = dimension
        self.bucket = bucket
        self.delta = delta
        self.uncompressed = uncompressed
        self.first_only = first_only
        self.sent = 0

    def bucket_of(self, tensor: Tensor, group: Any, by_rank: bool = False) -> Bucket | None:
        """What is in `tensor`, the whole tensor of a collective."""
        if self.bucket is None or isinstance(self.bucket, Bucket):
            return self.bucket
        return self.bucket(tensor.numel(), group, by_rank)

    def compresses_next(self, tensor: Tensor) -> bool:
        """Whether the next message to or from a neighbour, `tensor`, may be compressed."""
        if not self.first_only or not tensor.is_floating_point() or tensor.dim() == 0:
            return not self.first_only
        self.sent += 1
        return self.sent == 1


_current: ContextVar[Traffic | None] = ContextVar("ssdtrain_traffic", default=None)


def current_traffic() -> Traffic | None:
    """The traffic of this thread's innermost scope."""
    return _current.get()


@contextmanager
def traffic_scope(traffic: Traffic | None) -> Iterator[None]:
    """Set the traffic of this thread until the end; None: none, whatever scope is around."""
    token = _current.set(traffic)
    try:
        yield
    finally:
        _current.reset(token)


def in_scope(traffic_of: Callable[..., Traffic | None]) -> Wrap:
    """Run a function in the scope of the traffic that `traffic_of` returns for the arguments of the call."""
    return run_inside(lambda *args, **kwargs: traffic_scope(traffic_of(*args, **kwargs)))
