"""What computed and what waited, told apart by the timestamps of hooks."""

from types import SimpleNamespace
from typing import Any

from ssdtrain.profile.passes import HostTime, PassRecorder


class At:
    """A timestamp that may not have come yet."""

    def __init__(self, when: float | None) -> None:
        self.when = when

    def seconds(self) -> float | None:
        return self.when


class Tape:
    """As much of a tape as the recorder looks at; it keeps a weak reference."""

    def __init__(self) -> None:
        self.chunk, self.nbytes = 0, 0
        self.regions: list[Any] = []

    def save(self, nbytes: int, name: str) -> None:
        self.regions.append(SimpleNamespace(name=name, stays=False, operator=len(self.regions)))
        self.nbytes += nbytes


def test_between_hooks_it_computes_and_inside_it_waits() -> None:
    recorder, tape = PassRecorder(), Tape()
    recorder.request("plan", True)
    recorder.forward_began(tape, At(0.0))
    tape.save(100, "a")
    recorder.packed(tape, At(1.0), At(1.5))  # computed 1, waited 0.5
    recorder.packed(
        tape, At(2.0), At(2.0)
    )  # a tensor without a region: computed 0.5, which the next region gets
    tape.save(50, "b")
    recorder.packed(tape, At(3.0), At(3.25))
    recorder.unpacked(tape, 1, At(3.25), At(4.0))  # backward waits 0.75 for b, then computes 2
    recorder.unpacked(tape, 0, At(6.0), At(6.0))
    recorder.backward_ended(At(9.0))
    record = recorder.take()
    assert record.passed()
    (times,) = record.tapes()
    a, b = times.regions
    assert (a.name, a.nbytes, a.forward, a.store_stall, a.load_stall, a.backward) == (
        "a",
        100,
        1.0,
        0.5,
        0.0,
        3.0,
    )
    assert (b.name, b.nbytes, b.forward, b.store_stall, b.load_stall, b.backward) == (
        "b",
        50,
        1.5,
        0.25,
        0.75,
        2.0,
    )
    assert [kind for kind, _, _ in record.order] == ["forward", "backward"]
    assert recorder.take().order == []


def test_a_step_that_the_device_has_not_passed_is_not_read() -> None:
    recorder, tape = PassRecorder(), Tape()
    recorder.request("plan", True)
    end = At(None)
    recorder.forward_began(tape, At(0.0))
    tape.save(1, "a")
    recorder.packed(tape, At(1.0), end)
    record = recorder.take()
    assert not record.passed()
    end.when = 2.0
    assert record.passed()
    assert not record.tapes()[0].used


def test_what_one_user_takes_is_still_there_for_another() -> None:
    recorder, tape = PassRecorder(), Tape()
    recorder.request("plan", True)
    recorder.request("trace", True)
    recorder.forward_began(tape, At(0.0))
    tape.save(1, "a")
    recorder.packed(tape, At(1.0), At(2.0))
    recorder.forward_ended(tape, At(2.5))
    assert [kind for kind, *_ in recorder.take("plan").order] == ["forward"]
    recorder.unpacked(tape, 0, At(3.0), At(4.0))
    traced = recorder.take("trace")
    assert [one.kind for one in traced.passes()] == ["forward", "backward"]
    assert [kind for kind, *_ in recorder.take("plan").order] == ["backward"]
    recorder.request("plan", False)
    assert recorder.active and recorder.take("plan").order == []
    recorder.request("trace", False)
    assert not recorder.active


def test_a_region_that_was_released_meanwhile_has_no_name() -> None:
    """By another thread, between its save and the end of the hook: the tape has forgotten it."""
    recorder, tape = PassRecorder(), Tape()
    recorder.request("plan", True)
    recorder.forward_began(tape, At(0.0))
    tape.save(100, "a")
    tape.regions[0] = None
    recorder.packed(tape, At(1.0), At(1.5))
    (times,) = recorder.take().tapes()
    assert [(region.name, region.nbytes) for region in times.regions] == [("", 100)]


def test_a_hook_of_a_host_that_computes_is_computation_but_for_what_transfers_took_of_it() -> None:
    spent = HostTime(5.0, 5.0, 5.0)  # before: of a forward that was not recorded
    recorder, tape = PassRecorder(lambda: spent), Tape()
    recorder.request("plan", True)
    recorder.forward_began(tape, At(0.0))
    tape.save(100, "a")
    spent = HostTime(5.25, 5.0, 5.5)
    recorder.packed(tape, At(1.0), At(3.0))  # of 2 seconds it waited 0.25 and began a store for 0.5
    tape.save(50, "b")
    recorder.packed(tape, At(3.0), At(4.0))
    spent = HostTime(5.25, 5.75, 6.0)  # the last store is begun by no hook
    recorder.unpacked(tape, 1, At(4.0), At(5.0), from_tier=True)  # of 1 second it waited 0.75
    recorder.unpacked(tape, 0, At(6.0), At(6.5))
    recorder.backward_ended(At(8.0))
    (times,) = recorder.take().tapes()
    a, b = times.regions
    assert (a.forward, a.store_stall, a.storing, a.load_stall, a.backward) == (2.25, 0.25, 0.5, 0.0, 2.0)
    assert (b.forward, b.store_stall, b.storing, b.load_stall, b.backward) == (1.0, 0.0, 0.0, 0.75, 1.0)
    assert (a.loading, b.loading) == (0.0, 0.25)
