"""Whether a codec earns its time on this network: measured once for each kind of call, and agreed upon by all its ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 3
# A codec has to win by this much, or uncertainty and its error decide for the framework's own collective.
MARGIN = 0.97

_all_reduce = dist.all_reduce


class Verdict(NamedTuple):
    """What a probe found."""

    chosen: int
    """Index of the way to go."""
    seconds: tuple[float, ...]
    """Median of each, of the slowest rank."""


def choose(ways: Sequence[Callable[[], None]], group: dist.ProcessGroup, device: torch.device) -> Verdict:
    """Try each way in turn, several times. All ranks of `group` call it together.

    Args:
        ways: from the most wanted to the last resort; each runs one collective to its end. A later one is chosen if those
            before are slower than `MARGIN` times the last.
    """
    for way in ways:
        way()
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for found, way in zip(taken, ways, strict=True):
            _settle(device)
            begun = time.perf_counter()
            way()
            _settle(device)
            found.append(time.perf_counter() - begun)
    medians = torch.tensor([statistics.median(found) for found in taken], device=device)
    _all_reduce(medians, op=dist.ReduceOp.MAX, group=group)
    seconds = tuple(medians.tolist())
    limit = MARGIN * seconds[-1]
    chosen = next((i for i, found in enumerate(seconds[:-1]) if found <= limit), len(seconds) - 1)
    return Verdict(chosen, seconds)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
