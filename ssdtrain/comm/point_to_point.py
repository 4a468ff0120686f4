"""Messages to one peer, as pipeline stages send them.

Note: [Both sides make the same choice]
    Whether a message is coded follows from its shape and dtype, which the receiver's buffer has as well. Integers, masks and
    scalars are never compressed, and neither is anything smaller than the dimension's `min_bytes`. What does not fit in the
    payload of an exact codec follows it (see `overflow`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.codecs import ExactCodec, FixedSizeCodec, Key
from ssdtrain.comm.meter import CommMetrics
from ssdtrain.comm.overflow import (
    HostFlags,
    Overflows,
    PayloadName,
    PayloadPath,
    ReceivedPayload,
    SentPayload,
)
from ssdtrain.comm.policy import OFF, codec_of
from ssdtrain.comm.routing import (
    NOTHING_SAVED,
    OFF_INSIDE,
    OVERFLOWED,
    TOO_SMALL,
    Router,
    reason_against,
)
from ssdtrain.comm.work import ChainedWork

Issue = Callable[[Tensor], Any]
"""Sends or receives one tensor: returns what has a `wait()`, or None if it has waited."""


class PointToPoint:
    """Codes messages between two ranks.

    Args:
        key: of the random numbers at this moment.
        overflows: needed where a codec may overflow.
    """

    def __init__(self, router: Router, key: Callable[[], Key], overflows: Overflows | None) -> None:
        self._router = router
        self._key = key
        self._overflows = overflows

    def send(self, tensor: Tensor, dimension: str, peer: int, issue: Issue) -> ChainedWork | None:
        """Send `tensor` to global rank `peer` by `issue`, coded; None: not coded, and not sent.

        What is returned holds the message until it has been waited for. `tensor` may change as soon as this returns; on a GPU, if
        the codec may overflow, after the wait.
        """
        codec = self._codec(tensor, dimension, peer, sending=True)
        if codec is None:
            return None
        name = self._name(codec, dimension, dist.get_rank(), peer)
        if self._rests(name):
            self._router.count_fallback(dimension, OVERFLOWED, tensor.nbytes)
            return None
        metrics = self._router.meter.count_compressed(dimension, tensor.nbytes)
        begun = time.perf_counter()
        payload = torch.empty(
            codec.payload_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device=tensor.device
        )
        codec.encode(tensor.detach(), payload, self._key()._replace(tensor=metrics.calls & 0xFFFFFFFF))
        metrics.count_codec(begun)
        metrics.wire_bytes += payload.nbytes
        work = issue(payload)
        if name is None:
            return ChainedWork(work, keep_alive=(payload,))
        assert isinstance(codec, ExactCodec) and self._overflows is not None
        values, flag = tensor.detach(), codec.overflow_flag(payload)
        whole = slice(0, tensor.numel())
        sent = SentPayload(name, [flag], [whole], lambda: values.reshape(-1), [peer])
        self._overflows.owe([sent], metrics)
        chained = ChainedWork(work, lambda: self._settle(metrics), keep_alive=(payload,))
        self._overflows.began(name.path, chained)
        return chained

    def receive(self, tensor: Tensor, dimension: str, peer: int, issue: Issue) -> ChainedWork | None:
        """Receive into `tensor` from global rank `peer` by `issue`; there once waited for. None: it comes uncompressed, and
        nothing was received."""
        codec = self._codec(tensor, dimension, peer, sending=False)
        if codec is None:
            return None
        name = self._name(codec, dimension, peer, dist.get_rank())
        if self._rests(name):
            return None
        payload = torch.empty(
            codec.payload_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device=tensor.device
        )
        target, metrics = tensor.detach(), self._router.meter.of(dimension)

        def arrived() -> None:
            elements = None
            if name is not None:
                elements = self._elements(codec, name, payload, target, metrics)
            begun = time.perf_counter()
            if elements is None:
                codec.decode(payload, target)
            else:
                target.copy_(elements.view(target.shape))
            metrics.count_codec(begun)

        work = ChainedWork(issue(payload), arrived, keep_alive=(payload,))
        if name is not None:
            assert self._overflows is not None
            self._overflows.began(name.path, work)
        return work

    def _settle(self, metrics: CommMetrics) -> None:
        assert self._overflows is not None
        begun = time.perf_counter()
        self._overflows.settle()
        metrics.count_wait(begun)

    def _elements(
        self,
        codec: FixedSizeCodec,
        name: PayloadName,
        payload: Tensor,
        target: Tensor,
        metrics: CommMetrics,
    ) -> Tensor | None:
        """Receive what follows a payload that overflowed; None: it did not."""
        assert isinstance(codec, ExactCodec) and self._overflows is not None
        begun = time.perf_counter()
        self._overflows.settle()
        flag = codec.overflow_flag(payload)
        received = ReceivedPayload(name, [flag], [slice(0, target.numel())], target.dtype)
        (overflowed,) = HostFlags([received]).read()
        elements = self._overflows.receive(received, overflowed)
        metrics.count_wait(begun)
        return elements.get(0)

    def _name(self, codec: FixedSizeCodec, dimension: str, sender: int, receiver: int) -> PayloadName | None:
        """Return the name of the next message between two ranks; None: it cannot overflow."""
        if not codec.may_overflow:
            return None
        assert self._overflows is not None
        path = PayloadPath((dimension,), sender, receiver)
        return PayloadName(path, self._overflows.number(path), "")

    def _rests(self, name: PayloadName | None) -> bool:
        if name is None:
            return False
        assert self._overflows is not None
        return self._overflows.rests(name.path, name.number)

    def _codec(self, tensor: Tensor, dimension: str, peer: int, sending: bool) -> FixedSizeCodec | None:
        rule = self._router.policy.rules[dimension]
        hosts = self._router.hosts
        spec = rule.inside if hosts[peer] == hosts[dist.get_rank()] else rule.between
        reason = reason_against([rule], tensor.dtype, tensor.nbytes)
        if reason is None and tensor.dim() == 0:
            reason = TOO_SMALL
        if reason is None and spec == OFF:
            reason = OFF_INSIDE
        if reason is None:
            codec = codec_of(spec)
            if codec.payload_bytes(tensor.numel(), tensor.dtype) < tensor.nbytes:
                return codec
            reason = NOTHING_SAVED
        if sending:
            self._router.count_fallback(dimension, reason, tensor.nbytes)
        return None
