"""A plan against the fastest of others, from times of interleaved rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ssdtrain.tools.bench.ratios import interval

__all__ = ["over_best", "with_interval"]

Times = Sequence[float]
"""Seconds of one plan, one for each round; in a round all plans are neighbours in time."""


def over_best(choice: Times, others: Sequence[Times]) -> list[float]:
    """The time of a plan over that of the fastest of all, itself included, round by round.

    Which one is the fastest is found from the other half of the rounds (even for odd ones, and the reverse): the smallest of many
    noisy medians is smaller than any plan's time, and would make every choice look slow.
    """
    every = [choice, *others]
    found: list[float] = []
    for half in (0, 1):
        best = min(every, key=lambda times: statistics.median(times[1 - half :: 2]))
        found += [a / b for a, b in zip(choice[half::2], best[half::2], strict=True)]
    return found


def with_interval(name: str, ratios: Sequence[float]) -> dict[str, Any]:
    """Their median, and its 95% interval."""
    return {name: statistics.median(ratios), f"{name}_interval": interval(ratios)}
