"""Bits of each gradient bucket chosen by the error they make (after GraVAC, arXiv 2305.12201).

With error feedback a bucket bears a relative error that would ruin a plain compression, but not any. Every few steps all ranks
take the largest error that any of them measured for a bucket: above the target it gets more bits, and where a codec with fewer
bits is expected to stay below the target, fewer.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("ssdtrain")

LADDER = ("int2:block=32,asymmetric,hadamard=32", "int4:block=128,hadamard", "int8:block=128")
INTERVAL = 50
# One rung down multiplies the error of a uniform quantiser by about this.
_PER_RUNG = 20.0

_all_reduce = dist.all_reduce


class Adaptation:
    """The rung of each bucket.

    Args:
        target: largest relative error |lost| / |sent| of a bucket.
        start: codec that buckets begin with, if it is on the ladder.
    """

    def __init__(self, target: float, start: str) -> None:
        self.target = target
        self._start = LADDER.index(start) if start in LADDER else 1
        self._rungs: dict[str, int] = {}
        self._worst: dict[str, Tensor] = {}

    def codec(self, bucket: str) -> str:
        return LADDER[self._rungs.get(bucket, self._start)]

    def measured(self, bucket: str, errors: list[Tensor]) -> None:
        """What the pieces of a bucket lost in this step."""
        if not errors:
            return
        # A piece of zeros has lost nothing of nothing; an overflow says nothing about the codec.
        worst = torch.stack(errors).nan_to_num_(nan=0.0, posinf=0.0).max()
        before = self._worst.get(bucket)
        self._worst[bucket] = worst if before is None else torch.maximum(before, worst)

    def decide(self, step: int, group: dist.ProcessGroup) -> None:
        """Every `INTERVAL` steps, together with all ranks of `group`: buckets go up or down."""
        if not self._worst or step % INTERVAL:
            return
        names = sorted(self._worst)
        worst = torch.stack([self._worst[name] for name in names])
        _all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        self._worst.clear()
        for name, error in zip(names, worst.tolist(), strict=True):
            rung = self._rungs.get(name, self._start)
            if error > self.target and rung + 1 < len(LADDER):
                self._rungs[name] = rung + 1
            elif error * _PER_RUNG < self.target and rung > 0:
                self._rungs[name] = rung - 1
            if self._rungs.get(name, rung) != rung:
                logger.info(
                    "comm.adapt: bucket %s had a relative error of %.3f (target %.3f): from %s to %s",
                    name, error, self.target, LADDER[rung], LADDER[self._rungs[name]],
                )  # fmt: skip
