"""Whether a codec saves time on this network: measured at the first call of each kind, one verdict for all ranks of a group.

Note: [Stable verdicts]
    Times of single calls vary by tens of percent on a busy machine or network, so one comparison contradicts the next. Ways are
    timed in turn, and each round gives the ratios of neighbours in time, of the slowest rank. The plain collective is chosen only
    where it is clearly faster: the median of the ratios is outside of `BAND`, and so are most of them. While that is open,
    rounds are added; where it stays open, what was chosen before stays, and at the first time what sends fewer bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

BATCH = 3
"""Rounds between two looks at what was measured."""
MOST_BATCHES = 4
BAND = 1.10
"""Ratios of times up to this, either way, are none."""
CLEAR = 2.0
"""A ratio that needs no more rounds."""
_AGREEING = 0.75
"""Share of the rounds that have to agree."""

_all_reduce = dist.all_reduce


class Verdict(NamedTuple):
    chosen: int
    """Index of the chosen way."""
    seconds: tuple[float, ...]
    """Median time of each way on the slowest rank."""
    rounds: int


def choose(
    ways: Sequence[Callable[[], object]], group: dist.ProcessGroup, device: torch.device, before: int = 0
) -> Verdict:
    """Try each way in turn, several times. All ranks of `group` call it together. See Note: [Stable verdicts].

    Args:
        ways: in order of preference, the plain collective last; each runs one collective to its end.
        before: the index that is kept where times do not decide.
    """
    for way in ways:
        way()
    rounds: list[list[float]] = []
    chosen: int | None = None
    for batch in range(MOST_BATCHES):
        taken = [_round(ways, device, len(rounds) + n) for n in range(BATCH)]
        agreed = torch.tensor(taken, device=device)
        _all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        rounds += agreed.tolist()
        chosen = decide(rounds, before, last=batch == MOST_BATCHES - 1)
        if chosen is not None:
            break
    assert chosen is not None
    medians = tuple(statistics.median(times) for times in zip(*rounds, strict=True))
    return Verdict(chosen, medians, len(rounds))


def decide(rounds: Sequence[Sequence[float]], before: int, last: bool) -> int | None:
    """Return the index of the way to take after these rounds; None: more rounds are needed.

    Args:
        rounds: seconds of each way, the plain one last, by round.
        before: the index that is kept where times do not decide.
        last: there will be no more rounds.
    """
    plain = len(rounds[0]) - 1
    for way in range(plain):
        ratios = [times[way] / times[plain] for times in rounds]
        middle = statistics.median(ratios)
        slower = middle > BAND and statistics.fmean(ratio > BAND for ratio in ratios) >= _AGREEING
        faster = middle < 1 / BAND and statistics.fmean(ratio < 1 / BAND for ratio in ratios) >= _AGREEING
        clear = max(middle, 1 / middle) > CLEAR or len(rounds) > BATCH
        if slower and clear:
            continue
        if faster and clear:
            return way
        return max(before, way) if last else None
    return plain


def _round(ways: Sequence[Callable[[], object]], device: torch.device, number: int) -> list[float]:
    """Measure the seconds of each way. The order alternates, so that no way always runs after the same other one."""
    taken = [0.0] * len(ways)
    order = range(len(ways)) if number % 2 == 0 else reversed(range(len(ways)))
    for index in order:
        _synchronize(device)
        begun = time.perf_counter()
        ways[index]()
        _synchronize(device)
        taken[index] = time.perf_counter() - begun
    return taken


def _synchronize(device: torch.device) -> None:
    """Wait for this stream alone: others may hold work that waits for a peer, which may wait for this rank."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
