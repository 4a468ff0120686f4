"""Bits of each gradient bucket chosen by the error they make (after GraVAC, arXiv 2305.12201).

With error feedback a bucket tolerates a relative error that would ruin a plain compression, but not any. Every few steps all
ranks take the largest error that any of them measured for a bucket: above the target it gets more bits, and where a codec with
fewer bits is expected to stay below the target, fewer.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("ssdtrain")

LEVELS = ("int2:block=32,asymmetric,hadamard=32", "int4:block=128,hadamard", "int8:block=128")
DECISION_INTERVAL = 50
# One level down multiplies the error of a uniform quantiser by about this.
_ERROR_PER_LEVEL = 20.0

_all_reduce = dist.all_reduce


class _GroupBucket(NamedTuple):
    ranks: tuple[int, ...]
    """Global ranks of the group, which are the same in a resumed run."""
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
        self._levels: dict[_GroupBucket, int] = {}
        self._worst: dict[_GroupBucket, Tensor] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def codec(self, group: dist.ProcessGroup, bucket: str) -> str:
        return LEVELS[self._levels.get(self._key(group, bucket), self._start)]

    def _key(self, group: dist.ProcessGroup, bucket: str) -> _GroupBucket:
        ranks = tuple(dist.get_process_group_ranks(group))
        self._groups[ranks] = group  # the latest, where one was destroyed and made again
        return _GroupBucket(ranks, bucket)

    def measured(self, group: dist.ProcessGroup, bucket: str, errors: list[Tensor]) -> None:
        """Note the relative errors of a bucket's pieces in this step."""
        # A piece of zeros has lost nothing of nothing; an overflow says nothing about the codec.
        worst = torch.stack(errors).nan_to_num_(nan=0.0, posinf=0.0).max()
        before = self._worst.get(key := self._key(group, bucket))
        self._worst[key] = worst if before is None else torch.maximum(before, worst)

    def decide(self, step: int) -> None:
        """Move buckets up or down, every `DECISION_INTERVAL` steps. A collective call of all ranks."""
        if not self._worst or step % DECISION_INTERVAL:
            return
        # Groups in the order of their first call, which all their ranks share. Of one that this run has not called yet there is
        # only what a checkpoint brought.
        for ranks, group in self._groups.items():
            buckets = sorted((b for b in self._worst if b.ranks == ranks), key=lambda bucket: bucket.name)
            if not buckets:
                continue
            worst = torch.stack([self._worst[bucket] for bucket in buckets])
            _all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
            for bucket, error in zip(buckets, worst.tolist(), strict=True):
                self._decide(bucket, error)
        self._worst.clear()

    def clear(self) -> None:
        """Return all buckets to the start."""
        self._levels.clear()
        self._worst.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return levels and errors as numbers, for a checkpoint."""
        return {
            "levels": [(list(ranks), name, LEVELS[level]) for (ranks, name), level in self._levels.items()],
            "worst": [(list(ranks), name, error.item()) for (ranks, name), error in self._worst.items()],
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take the levels of `state_dict`, and what was measured since they were decided."""
        self.clear()
        for ranks, name, level in state["levels"]:
            self._levels[_GroupBucket(tuple(ranks), name)] = LEVELS.index(level)
        for ranks, name, error in state["worst"]:
            self._worst[_GroupBucket(tuple(ranks), name)] = torch.tensor(error, device=device)

    def _decide(self, bucket: _GroupBucket, error: float) -> None:
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
