"""Points in a device's time line, over more time than a float32 of milliseconds can tell apart."""

from __future__ import annotations

import struct
from typing import Any

from ssdtrain.device.timestamps import CudaTimestamp, Origin


class Event:
    """At a time in seconds; CUDA's `elapsed_time` has the precision of a float32 of milliseconds."""

    def __init__(self, at: float, passed: bool = True) -> None:
        self.at = at
        self.passed = passed

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Event) -> float:
        found: float = struct.unpack("f", struct.pack("f", 1e3 * (other.at - self.at)))[0]
        return found


def chained(hours: float, period: float = 60.0) -> Any:
    """The origin after so many hours."""
    origin = Origin(Event(0.0), None)  # type: ignore[arg-type]
    for number in range(1, int(hours * 3600 / period) + 1):
        event: Any = Event(number * period)
        origin = Origin(event, CudaTimestamp(origin, event))
        origin.seconds()
    return origin


def test_microseconds_are_told_apart_after_ten_hours() -> None:
    origin = chained(10)
    one, other = (CudaTimestamp(origin, Event(36_000 + at)) for at in (1.0, 1.00005))  # type: ignore[arg-type]
    first, second = one.seconds(), other.seconds()
    assert first is not None and second is not None
    assert abs(first - 36_001) < 1e-2 and abs(second - first - 50e-6) < 1e-5


def test_it_is_unknown_until_the_device_has_come_to_it_and_to_its_origin() -> None:
    first: Any = Event(0.0)
    later: Any = Event(60.0, passed=False)
    origin = Origin(later, CudaTimestamp(Origin(first, None), later))
    after: Any = Event(61.0)
    stamp = CudaTimestamp(origin, after)
    assert stamp.seconds() is None
    later.passed = True
    assert stamp.seconds() == 61.0
    after.passed = False
    assert stamp.seconds() is None
