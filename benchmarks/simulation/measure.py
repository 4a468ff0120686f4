"""Figures of a simulated step: overlap, and the times that bandwidth and arithmetic allow."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.simulation.device import Interval
from benchmarks.simulation.training import LayerTimes, StepRecord

__all__ = ["bound", "overlap", "phase_seconds"]


def overlap(transfers: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """The part of the transfers' time in which the device computed, 1 where there were none."""
    total = sum(item.end - item.start for item in transfers)
    if not total:
        return 1.0
    both = 0.0
    for item in transfers:
        for other in compute:
            both += max(0.0, min(item.end, other.end) - max(item.start, other.start))
    return both / total


def phase_seconds(record: StepRecord, label: str) -> float:
    """From the beginning of the first to the end of the last piece of compute whose label begins so."""
    found = [item for item in record.compute if item.label.startswith(label)]
    return max(item.end for item in found) - min(item.start for item in found)


def bound(layers: Sequence[LayerTimes], moved: int, rates: Sequence[float]) -> tuple[float, float]:
    """(forward, backward) seconds at least, for `moved` bytes that leave in forward and come back in backward.

    Args:
        rates: bytes per second of each link that all of them pass: PCIe, the drives together.
    """
    slowest = min(rates)
    forward = sum(layer.forward for layer in layers)
    backward = sum(layer.backward for layer in layers)
    return max(forward, moved / slowest), max(backward, moved / slowest)
