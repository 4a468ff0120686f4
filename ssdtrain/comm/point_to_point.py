"""Messages to one peer, as pipeline stages send them.

Note: [Both sides make the same choice]
    Whether a message is coded follows from its shape and dtype, which the receiver's buffer has as well. Integers, masks and
    scalars are never compressed, and neither is anything smaller than the dimension's `min_bytes`. What has no place in an exact
    payload that does not fit follows it (see `overflow`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.codecs import Key
from ssdtrain.comm.coding import Coder, TensorPiece
from ssdtrain.comm.collectives import flattened
from ssdtrain.comm.meter import CommMetrics
from ssdtrain.comm.overflow import (
    OVERFLOWED,
    HostFlags,
    Overflows,
    PayloadName,
    PayloadPath,
    ReceivedPayload,
    SentPayload,
)
from ssdtrain.comm.policy import OFF, codec_of
from ssdtrain.comm.routing import NOTHING_SAVED, OFF_INSIDE, TOO_SMALL, Router, reason_against
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
        piece = TensorPiece(flattened(tensor)[0])
        coder = self._coder(tensor, piece, dimension, peer, sending=True)
        if coder is None:
            return None
        name = self._name(coder, dimension, dist.get_rank(), peer)
        if self._rests(name):
            self._router.count_fallback(dimension, OVERFLOWED, tensor.nbytes)
            return None
        metrics = self._router.meter.count_compressed(dimension, tensor.nbytes)
        begun = time.perf_counter()
        payload = torch.empty(coder.nbytes(piece), dtype=torch.uint8, device=tensor.device)
        coder.encode(piece, payload, self._key()._replace(tensor=metrics.calls & 0xFFFFFFFF))
        metrics.count_codec(begun)
        metrics.wire_bytes += payload.nbytes
        work = issue(payload)
        if name is None:
            return ChainedWork(work, keep_alive=(payload,))
        exact = coder.exact(piece)
        assert exact is not None and self._overflows is not None
        flags = coder.overflow_flags(payload, piece)
        sent = SentPayload(name, flags, exact.behind, lambda: piece.values, [peer])
        self._overflows.owe([sent], metrics)
        chained = ChainedWork(work, lambda: self._settle(metrics), keep_alive=(payload,))
        self._overflows.began(name.path, chained)
        return chained

    def receive(self, tensor: Tensor, dimension: str, peer: int, issue: Issue) -> ChainedWork | None:
        """Receive into `tensor` from global rank `peer` by `issue`; there once waited for. None: it comes uncompressed, and
        nothing was received."""
        flat, then = flattened(tensor)
        piece = TensorPiece(flat)
        coder = self._coder(tensor, piece, dimension, peer, sending=False)
        if coder is None:
            return None
        name = self._name(coder, dimension, peer, dist.get_rank())
        if self._rests(name):
            return None
        payload = torch.empty(coder.nbytes(piece), dtype=torch.uint8, device=tensor.device)
        metrics = self._router.meter.of(dimension)

        def arrived() -> None:
            known = {} if name is None else self._elements(coder, name, payload, piece, metrics)
            begun = time.perf_counter()
            coder.decode(payload, piece, known=known)
            if then is not None:
                then()
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
        self, coder: Coder, name: PayloadName, payload: Tensor, piece: TensorPiece, metrics: CommMetrics
    ) -> dict[int, Tensor]:
        """Receive what follows the sections of a payload that did not fit."""
        exact = coder.exact(piece)
        assert exact is not None and self._overflows is not None
        begun = time.perf_counter()
        self._overflows.settle()
        received = ReceivedPayload(name, coder.overflow_flags(payload, piece), exact.behind, exact.dtype)
        (overflowed,) = HostFlags([received]).read()
        elements = self._overflows.receive(received, overflowed)
        metrics.count_wait(begun)
        return elements

    def _name(self, coder: Coder, dimension: str, sender: int, receiver: int) -> PayloadName | None:
        """Return the name of the next message between two ranks; None: it cannot overflow."""
        if not coder.may_overflow:
            return None
        assert self._overflows is not None
        path = PayloadPath((dimension,), sender, receiver)
        return PayloadName(path, self._overflows.number(path), "")

    def _rests(self, name: PayloadName | None) -> bool:
        if name is None:
            return False
        assert self._overflows is not None
        return self._overflows.rests(name.path, name.number)

    def _coder(
        self, tensor: Tensor, piece: TensorPiece, dimension: str, peer: int, sending: bool
    ) -> Coder | None:
        rule = self._router.policy.rules[dimension]
        hosts = self._router.hosts
        spec = rule.inside if hosts[peer] == hosts[dist.get_rank()] else rule.between
        reason = reason_against([rule], tensor.dtype, tensor.nbytes)
        if reason is None and tensor.dim() == 0:
            reason = TOO_SMALL
        if reason is None and spec == OFF:
            reason = OFF_INSIDE
        if reason is None:
            coder = Coder(codec_of(spec), tensor.dtype, section=self._router.section)
            if coder.encodes(piece):
                return coder
            reason = NOTHING_SAVED
        if sending:
            self._router.count_fallback(dimension, reason, tensor.nbytes)
        return None
