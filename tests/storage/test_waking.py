"""When the pool's workers wake: not for what was queued for later, and no more of them than have something to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdtrain.storage import Arena, IOCancelled, Operation, Slot, SpillStore
from tests.storage.conftest import contents, filled, payload
from tests.support.filesystems import eventually

MiB = 1 << 20
Make = Callable[..., SpillStore]


@pytest.fixture
def engine() -> str:
    """The Python engine starts everything at once."""
    return "c"


def asleep() -> bool:
    """Every other thread of this process sleeps, the workers among them."""
    others = [
        task for task in Path("/proc/self/task").iterdir() if int(task.name) != threading.get_native_id()
    ]
    try:
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in others)
    except OSError:
        return False  # a thread that ended meanwhile


class Writer:
    """Writes one source again and again, to slots of its own."""

    def __init__(self, store: SpillStore, arena: Arena, nbytes: int) -> None:
        self.store, self.nbytes = store, nbytes
        self.source = filled(arena, nbytes, seed=3)
        self.slots: list[Slot] = []
        assert eventually(asleep)

    def write(self, *, defer: bool) -> Operation:
        self.slots.append(self.store.reserve(self.nbytes))
        operation = self.store.write(self.slots[-1], self.source.address, defer=defer)
        if defer:
            time.sleep(0.05)
            assert not operation.begun() and not operation.done(), "somebody was woken for it"
        return operation

    def free(self) -> None:
        for slot in self.slots:
            self.store.free(slot)


WAKERS: dict[str, Callable[[Writer, Operation], object]] = {
    "a flush": lambda writer, operation: writer.store.flush(),
    "a wait": lambda writer, operation: operation.wait(30),
    "the next write": lambda writer, operation: writer.write(defer=False),
}


@pytest.mark.parametrize("waker", WAKERS)
@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_what_was_queued_for_later_begins_with(waker: str, tier: str, make_store: Make, arena: Arena) -> None:
    store = make_store(host_bytes=16 * MiB if tier == "host" else 0)
    writer = Writer(store, arena, MiB)
    operation = writer.write(defer=True)
    WAKERS[waker](writer, operation)
    assert eventually(operation.done) and operation.wait()
    assert contents(store, writer.slots[0], arena) == payload(MiB, 3)
    writer.free()


def test_a_wake_on_one_drive_wakes_the_others_too(make_store: Make, arena: Arena) -> None:
    """Slots alternate between drives: what waits on one must not sleep on while the other is woken every time."""
    store = make_store(2)
    writer = Writer(store, arena, MiB)
    operation = writer.write(defer=True)
    assert writer.write(defer=False).wait(30)
    assert all(drive.used for drive in store.metrics.drives), "both lie on one drive"
    assert eventually(operation.done)
    writer.free()


def test_a_striped_operation_begins_on_all_of_its_drives(make_store: Make, arena: Arena) -> None:
    store = make_store(2, stripe=MiB)
    small, striped = Writer(store, arena, 4096), Writer(store, arena, 4 * MiB)
    operation = striped.write(defer=True)
    assert small.write(defer=False).wait(30), "this wakes the worker of one drive at least"
    assert operation.wait(30)
    assert contents(store, striped.slots[0], arena) == payload(4 * MiB, 3)
    small.free()
    striped.free()


def test_what_was_queued_for_later_can_be_cancelled(make_store: Make, arena: Arena) -> None:
    store = make_store()
    writer = Writer(store, arena, MiB)
    operation = writer.write(defer=True)
    assert operation.cancel() and operation.done()
    assert writer.write(defer=False).wait(30)
    assert store.metrics.bytes_written == MiB
    writer.free()


def test_closing_cancels_what_was_queued_for_later(tmp_path: Path, arena: Arena, engine: str) -> None:
    with SpillStore([tmp_path], engine=engine) as store:
        operation = Writer(store, arena, MiB).write(defer=True)
    assert isinstance(operation.failed(), IOCancelled) and store.metrics.bytes_written == 0
    store.flush()  # of a closed store: nothing


def test_a_second_worker_joins_for_a_backlog_and_a_read_waits_for_no_write(
    make_store: Make, arena: Arena
) -> None:
    """The first worker is stopped in the middle of its write: what the others do is what was asked of them."""
    store = make_store(threads=3)
    small, large = Writer(store, arena, 4096), Writer(store, arena, 8 * MiB)
    assert small.write(defer=False).wait(30) and eventually(asleep)
    store.pool.hold(begun=True, reads=False)
    writes = [large.write(defer=False)]
    assert eventually(writes[0].begun) and eventually(asleep)
    writes += [large.write(defer=False) for _ in range(2)]
    time.sleep(0.05)
    assert not writes[1].begun(), "16 MiB that wait are no backlog"
    writes.append(large.write(defer=False))
    assert eventually(writes[1].begun), "24 MiB are one"
    target = arena.acquire(4096)
    assert store.read(small.slots[0], target.address).wait(30)
    target.release()
    store.pool.release()
    assert all(write.wait(30) for write in writes)
    small.free()
    large.free()
