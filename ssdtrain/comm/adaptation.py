"""Bits of each gradient bucket chosen by the error they make (after GraVAC, arXiv 2305.12201).

With error feedback a bucket tolerates a relative error that would ruin a plain compression, but not any. Every few steps all
ranks take the largest error that any of them measured for a bucket: above the target it gets more bits, and where a codec with
fewer bits is expected to stay below the target, fewer.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("ssdtrain")

LEVELS = ("int2:block=32,asymmetric,hadamard=32", "int4:block=128,hadamard", "int8:block=128")
INTERVAL = 50
# One level down multiplies the error of a uniform quantiser by about this.
_ERROR_PER_LEVEL = 20.0

_all_reduce = dist.all_reduce


class _Bucket(NamedTuple):
    """A bucket of one group."""

    group: dist.ProcessGroup
    name: str


class AdaptiveBitWidth:
    """The level of each bucket: one of `LEVELS`.

    Args:
        target: largest relative error |lost| / |sent| of a bucket.
        start: codec that buckets begin with, if it is among the levels.
    """

    def __init__(self, target: float, start: str) -> None:
        self.target = target
        self._start = LEVELS.index(start) if start in LEVELS else 1
        self._levels: dict[_Bucket, int] = {}
        self._worst: dict[_Bucket, Tensor] = {}

    def codec(self, group: dist.ProcessGroup, bucket: str) -> str:
        return LEVELS[self._levels.get(_Bucket(group, bucket), self._start)]

    def measured(self, group: dist.ProcessGroup, bucket: str, errors: list[Tensor]) -> None:
        """What the pieces of a bucket lost in this step."""
        # A piece of zeros has lost nothing of nothing; an overflow says nothing about the codec.
        worst = torch.stack(errors).nan_to_num_(nan=0.0, posinf=0.0).max()
        before = self._worst.get(key := _Bucket(group, bucket))
        self._worst[key] = worst if before is None else torch.maximum(before, worst)

    def decide(self, step: int) -> None:
        """Every `INTERVAL` steps, together with all ranks: buckets go up or down."""
        if not self._worst or step % INTERVAL:
            return
        # Groups in the order of their first call, which all their ranks share.
        for group in dict.fromkeys(bucket.group for bucket in self._worst):
            buckets = sorted((b for b in self._worst if b.group is group), key=lambda bucket: bucket.name)
            worst = torch.stack([self._worst[bucket] for bucket in buckets])
            _all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
            for bucket, error in zip(buckets, worst.tolist(), strict=True):
                self._decide(bucket, error)
        self._worst.clear()

    def _decide(self, bucket: _Bucket, error: float) -> None:
        before = level = self._levels.get(bucket, self._start)
        if error > self.target and level + 1 < len(LEVELS):
            level += 1
        elif error * _ERROR_PER_LEVEL < self.target and level > 0:
            level -= 1
        if level != before:
            self._levels[bucket] = level
            logger.info(
                "comm.adapt: bucket %s had a relative error of %.3f (target %.3f): from %s to %s",
                bucket.name, error, self.target, LEVELS[before], LEVELS[level],
            )  # fmt: skip
