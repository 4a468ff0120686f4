"""Points in the time line of a device."""

from __future__ import annotations

import time
from typing import Protocol

import torch

__all__ = ["ORIGIN_PERIOD", "CudaTimestamp", "HostTimestamp", "Origin", "Timestamp"]

ORIGIN_PERIOD = 60.0
"""Seconds that an event which others are timed from serves."""


class Timestamp(Protocol):
    """A point in the time line of a device."""

    def seconds(self) -> float | None:
        """Read the time on a clock of the device; None: it has not come to that point. Does not block."""


class HostTimestamp:
    """A point in time of the host, which computes itself.

    Args:
        now: seconds.
    """

    __slots__ = ("now",)

    def __init__(self, now: float) -> None:
        self.now = now

    def seconds(self) -> float:
        return self.now


class Origin:
    """An event that later ones are timed from. CUDA gives the time between two events in float32: after an hour it would be known
    to a quarter of a millisecond only. So there is a new origin each minute, timed from the one before.

    Args:
        event: recorded now.
        timestamp: of the event, from the origin before; None: it is the first.
    """

    def __init__(self, event: torch.cuda.Event, timestamp: CudaTimestamp | None) -> None:
        self.event = event
        self.made = time.monotonic()
        self._timestamp = timestamp
        self._seconds = 0.0

    def seconds(self) -> float | None:
        """Read the time since the first origin; None: the device has not come to it."""
        if self._timestamp is not None:
            found = self._timestamp.seconds()
            if found is None:
                return None
            self._seconds, self._timestamp = found, None
        return self._seconds if self.event.query() else None


class CudaTimestamp:
    """When the device comes to `event`, from `origin` on."""

    __slots__ = ("_event", "_origin")

    def __init__(self, origin: Origin, event: torch.cuda.Event) -> None:
        self._origin, self._event = origin, event

    def seconds(self) -> float | None:
        if not self._event.query():
            return None
        origin = self._origin.seconds()
        return None if origin is None else origin + self._origin.event.elapsed_time(self._event) / 1e3
