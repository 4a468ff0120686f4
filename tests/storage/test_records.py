"""Records of fixed fields, in C and in Python."""

from __future__ import annotations

import gc
from queue import SimpleQueue
from typing import Any

import pytest

from ssdtrain.storage import record, records


@pytest.fixture(params=["c", "python"])
def in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "python":
        monkeypatch.setattr(records, "_native", None)
    return bool(request.param == "c")


def test_fields_are_taken_by_place_and_those_with_a_value_may_be_left_out(in_c: bool) -> None:
    @record()
    class Point:
        """Two coordinates."""

        x: int
        y: int = 7

        def total(self) -> int:
            return self.x + self.y

    point = Point(1)
    assert (point.x, point.y, point.total(), Point(1, 2).y, Point.__doc__) == (1, 7, 8, 2, "Two coordinates.")
    point.y = 3
    assert point.total() == 4
    for values in ((), (1, 2, 3)):
        with pytest.raises(TypeError, match="1 to 2 values"):
            Point(*values)
    with pytest.raises(AttributeError):
        point.z = 1  # type: ignore[attr-defined]
    del point.x
    with pytest.raises(AttributeError):
        del point.x  # so that one of two threads is the one that deletes it


@record()
class Alone:
    other: Any = None


@record(collected=True)
class Linked:
    other: Any = None


def test_the_collector_looks_only_at_records_that_may_be_parts_of_cycles() -> None:
    assert not gc.is_tracked(Alone([])) and gc.is_tracked(Linked([]))

    class Watched:
        alive = 0

        def __init__(self) -> None:
            Watched.alive += 1

        def __del__(self) -> None:
            Watched.alive -= 1

    for _ in range(10):
        linked = Linked([Watched()])
        linked.other.append(linked)
    del linked
    gc.collect()
    assert Watched.alive == 0


def test_a_death_is_told_to_a_queue(in_c: bool) -> None:
    @record()
    class Death:
        name: str
        place: int | None

    @record(told=("queue", "name", "place"), tells=Death)
    class Dying:
        queue: SimpleQueue[Any]
        name: str
        place: int | None = None

    queue: SimpleQueue[Any] = SimpleQueue()
    dying = Dying(queue, "first")
    held = [dying, Dying(queue, "second", 2)]
    assert queue.empty()
    dying.place = 5
    del dying
    assert queue.empty()  # it is held
    held.reverse()
    while held:
        held.pop()
    deaths = [queue.get_nowait() for _ in range(2)]
    assert [(death.name, death.place) for death in deaths] == [("first", 5), ("second", 2)]
    assert not (
        in_c and any(map(gc.is_tracked, deaths))
    )  # nor did making them run the collector, and finalizers in it
