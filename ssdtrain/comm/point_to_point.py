"""Messages to one peer, as pipeline stages send them.

Note: [Both sides make the same choice]
    Whether a message is coded follows from its shape and dtype, which the receiver's buffer has as well. Integers, masks and
    scalars are never compressed, and neither is anything smaller than the dimension's `min_bytes`.

Note: [Frames]
    A payload of a lossless codec has a size of its own. It follows a message of 8 bytes with that size. A tensor that does not
    shrink follows uncompressed, so such a message costs at most these 8 bytes more than the plain one. The receiver begins to
    receive the payload only when it waits; two neighbours that send to each other and wait for their sends first would never
    end. So the wait of a framed send returns at once (the message is a copy), and what is under way is waited for at the step's
    end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.codecs import Codec, FixedSizeCodec, Key
from ssdtrain.comm.policy import OFF, codec_of
from ssdtrain.comm.routing import NOTHING_SAVED, OFF_INSIDE, TOO_SMALL, Router, reason_against
from ssdtrain.comm.work import ChainedWork

# Framed messages under way, before the oldest is waited for.
MOST_OUTSTANDING = 64
# In a frame: the tensor follows without a codec.
_AS_IT_IS = 0

Issue = Callable[[Tensor], Any]
"""Sends or receives one tensor: returns what has a `wait()`, or None if it has waited."""


class PointToPoint:
    """Codes messages between two ranks.

    Args:
        key: of the random numbers at this moment.
    """

    def __init__(self, router: Router, key: Callable[[], Key]) -> None:
        self._router = router
        self._key = key
        self._outstanding: deque[ChainedWork] = deque()

    def send(self, tensor: Tensor, dimension: str, peer: int, issue: Issue) -> ChainedWork | None:
        """Send `tensor` to global rank `peer` by `issue`, coded; None: not coded, and not sent.

        `tensor` may change as soon as this returns; the message is held by what is returned until it has been waited for.
        """
        codec = self._codec(tensor, dimension, peer, sending=True)
        if codec is None:
            return None
        metrics = self._router.meter.count_compressed(dimension, tensor.nbytes)
        begun = time.perf_counter()
        payload = torch.empty(
            codec.max_payload_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device=tensor.device
        )
        size = codec.encode(tensor.detach(), payload, self._key()._replace(tensor=metrics.calls & 0xFFFFFFFF))
        metrics.count_codec(begun)
        if isinstance(codec, FixedSizeCodec):
            metrics.wire_bytes += size
            return ChainedWork(issue(payload), keep_alive=(payload,))
        message, frame = payload[:size], torch.tensor([size], dtype=torch.int64, device="cpu")
        if size >= tensor.nbytes:
            message, frame = tensor.detach().clone().contiguous(), torch.zeros_like(frame)
        metrics.wire_bytes += frame.nbytes + message.nbytes
        for part in (frame, message):
            self._outstanding.append(ChainedWork(issue(part), keep_alive=(part,)))
        while len(self._outstanding) > MOST_OUTSTANDING:
            self._outstanding.popleft().wait()
        return ChainedWork(None)

    def receive(self, tensor: Tensor, dimension: str, peer: int, issue: Issue) -> ChainedWork | None:
        """Receive into `tensor` from global rank `peer` by `issue`; there once waited for. None: it comes uncompressed, and
        nothing was received."""
        codec = self._codec(tensor, dimension, peer, sending=False)
        if codec is None:
            return None
        size = codec.max_payload_bytes(tensor.numel(), tensor.dtype)
        target = tensor.detach()
        if isinstance(codec, FixedSizeCodec):
            payload = torch.empty(size, dtype=torch.uint8, device=tensor.device)
            return ChainedWork(
                issue(payload), lambda: self._decode(codec, payload, target, dimension), keep_alive=(payload,)
            )
        frame = torch.zeros(1, dtype=torch.int64, device="cpu")

        def rest() -> None:
            nbytes = int(frame.item())
            if not 0 <= nbytes <= size:
                raise RuntimeError(
                    f"comm.{dimension}: a message from rank {peer} says it has {nbytes} bytes of at most {size}"
                )
            if nbytes == _AS_IT_IS:
                values = torch.empty(target.shape, dtype=target.dtype, device="cpu")
                ChainedWork(issue(values)).wait()
                target.copy_(values)
                return
            payload = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            ChainedWork(issue(payload)).wait()
            self._decode(codec, payload, target, dimension)

        return ChainedWork(issue(frame), rest, keep_alive=(frame,))

    def wait_outstanding(self) -> None:
        """Wait for framed messages that are still under way."""
        while self._outstanding:
            self._outstanding.popleft().wait()

    def _decode(self, codec: Codec, payload: Tensor, target: Tensor, dimension: str) -> None:
        begun = time.perf_counter()
        codec.decode(payload, target)
        self._router.meter.of(dimension).count_codec(begun)

    def _codec(self, tensor: Tensor, dimension: str, peer: int, sending: bool) -> Codec | None:
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
            if not isinstance(codec, FixedSizeCodec):
                if tensor.device.type == "cpu":
                    return codec
                reason = f"{spec} works in host memory, and the tensor is on {tensor.device.type}"
            elif codec.max_payload_bytes(tensor.numel(), tensor.dtype) < tensor.nbytes:
                return codec
            else:
                reason = NOTHING_SAVED
        if sending:
            self._router.count_fallback(dimension, reason, tensor.nbytes)
        return None
