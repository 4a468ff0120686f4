"""Figures of a simulated step: overlap, and the times that bandwidth and arithmetic allow."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.simulated.device import Interval
from tests.support.simulated.training import LayerTimes, StepRecord

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


def bound(
    layers: Sequence[LayerTimes], stored: float, loaded: float, drive: float, pcie: float
) -> tuple[float, float]:
    """(forward, backward) seconds of one microbatch at least: those of the layers, or of the transfers.

    Nothing can be written before the first layer has run and been copied, and the first layer's backward comes after all that
    is read.

    Args:
        stored: bytes that leave during forward.
        loaded: bytes that come back during backward.
        drive, pcie: bytes per second.
    """
    rate = min(drive, pcie)
    first, copied = layers[0], sum(layers[0].saved) / pcie
    forward = sum(layer.forward for layer in layers)
    backward = sum(layer.backward for layer in layers)
    return (
        max(forward, first.forward + copied + stored / rate),
        max(backward, first.backward + copied + loaded / rate),
    )
