"""Comparison of runs on a machine whose speed varies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch


def synchronize(device: torch.device) -> None:
    """Wait for what was queued on a GPU, before the clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of runs that were neighbours in time: a shared machine drifts, neighbours drift together."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of the median that assumes no distribution: the order statistics of the binomial with p = 1/2.

    With fewer than 6 values there is no 95% interval; the extremes are returned.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, low, term = 0.0, 0, 0.5**count
    while 2 * (outside + term) <= 0.05:
        outside += term
        term *= (count - low) / (low + 1)
        low += 1
    low = max(low - 1, 0)
    return ordered[low], ordered[count - 1 - low]
