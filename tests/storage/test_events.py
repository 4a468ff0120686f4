"""Writes behind a CUDA event: a stand-in of cudaEventQuery says when it has passed."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.storage import Arena, IOCancelled, IOFailure, SpillStore
from ssdtrain.storage.pieces import WRITE, Request
from ssdtrain.storage.pool import ErrorMaker
from ssdtrain.storage.python_engine import EVENT_NOT_READY, RELAXED_CAPTURE, PythonPool
from tests.storage.conftest import blank, contents, filled, payload
from tests.support.filesystems import eventually

MiB = 1 << 20
Make = Callable[..., SpillStore]
libc = ctypes.CDLL(None)


def address_of(function: object) -> int:
    value = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert value
    return value


class Events:
    """Events by number, which pass when they are told to."""

    def __init__(self) -> None:
        self.passed: set[int] = set()
        self.queried: list[int] = []
        self.threads: set[int] = set()
        self.before: Callable[[int], object] = lambda event: None

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        def query(event: int) -> int:
            self.threads.add(threading.get_ident())
            self.before(event)
            if not self.queried or self.queried[-1] != event:
                self.queried.append(event)
            return 0 if event in self.passed else EVENT_NOT_READY

        self._query = query
        self.address = address_of(query)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.mark.parametrize("host", [0, 8 * MiB], ids=["drive", "host"])
def test_a_write_waits_for_its_event_before_it_reads_the_source(
    make_store: Make, arena: Arena, host: int, events: Events
) -> None:
    source = filled(arena, MiB, seed=1)
    store = make_store(host_bytes=host, event_query=events.address)
    slot = store.reserve(MiB)
    write = store.write(slot, source.address, after_event=0xE0)
    assert not write.wait(0.05)
    source.view()[:] = payload(MiB, 2)
    events.passed.add(0xE0)
    assert write.wait(30) and set(events.queried) == {0xE0}
    assert contents(store, slot, arena) == payload(MiB, 2)


def test_reads_and_other_writes_go_on_while_an_event_is_far_away(
    make_store: Make, arena: Arena, events: Events
) -> None:
    """More writes wait than there are workers: none of them is taken by one."""
    store = make_store(threads=2, event_query=events.address)
    source, target = filled(arena, MiB), blank(arena, MiB)
    stored = store.reserve(MiB)
    assert store.write(stored, source.address).wait(30)
    slots = [store.reserve(MiB) for _ in range(5)]
    writes = [store.write(slot, source.address, after_event=1) for slot in slots]
    assert eventually(lambda: bool(events.queried))
    assert store.read(stored, target.address).wait(60) and bytes(target.view()) == payload(MiB)
    assert store.write(stored, source.address).wait(60), "it has no event"
    assert not any(write.begun() or write.done() for write in writes)
    events.passed.add(1)
    assert all(write.wait(30) for write in writes)


def test_events_are_awaited_in_order_by_one_thread(make_store: Make, arena: Arena, events: Events) -> None:
    store = make_store(event_query=events.address)
    source = filled(arena, MiB)
    slots = [store.reserve(MiB) for _ in range(3)]
    writes = [store.write(slot, source.address, after_event=n + 1) for n, slot in enumerate(slots)]
    events.passed |= {2, 3}
    assert eventually(lambda: bool(events.queried))
    time.sleep(0.05)
    assert events.queried == [1] and not writes[1].done()
    events.passed.add(1)
    assert all(write.wait(30) for write in writes)
    assert events.queried == [1, 2, 3] and len(events.threads) == 1


def test_a_write_whose_event_has_not_passed_can_be_cancelled(
    make_store: Make, arena: Arena, events: Events
) -> None:
    store = make_store(threads=1, event_query=events.address)
    sources = [filled(arena, MiB, seed=n) for n in range(2)]
    slots = [store.reserve(MiB) for _ in sources]
    writes = [
        store.write(slot, source.address, after_event=n + 1)
        for n, (slot, source) in enumerate(zip(slots, sources, strict=True))
    ]
    assert eventually(lambda: bool(events.queried)), "the waiter looks at the first"
    assert not writes[0].begun() and writes[0].cancel() and isinstance(writes[0].failed(), IOCancelled)
    events.passed.add(2)
    assert writes[1].wait(30), "the event of the one that was cancelled holds nobody back"
    with pytest.raises(ValueError, match="never written"):
        store.read(slots[0], sources[0].address)
    assert store.metrics.cancelled_io_bytes == MiB


def test_a_cancel_waits_until_nobody_looks_at_the_event(
    make_store: Make, arena: Arena, events: Events
) -> None:
    """Whoever cancelled destroys the event next."""
    store = make_store(event_query=events.address)
    source, slot = filled(arena, MiB), store.reserve(MiB)
    looking, look = threading.Event(), threading.Event()
    events.before = lambda event: (looking.set(), look.wait(30))
    write = store.write(slot, source.address, after_event=1)
    assert looking.wait(30)
    cancelled: list[bool] = []
    thread = threading.Thread(target=lambda: cancelled.append(write.cancel()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not cancelled
    look.set()
    thread.join()
    assert cancelled == [True]
    count = len(events.queried)
    time.sleep(0.02)
    assert len(events.queried) == count


def test_a_store_closes_though_an_event_never_comes(make_store: Make, arena: Arena, events: Events) -> None:
    store = make_store(event_query=events.address)
    source = filled(arena, MiB)
    writes = [store.write(store.reserve(MiB), source.address, after_event=n) for n in (1, 2)]
    assert eventually(lambda: bool(events.queried))
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 5
    assert all(isinstance(write.failed(), IOCancelled) for write in writes)


def test_a_failed_event_fails_the_write_and_transfers_nothing(make_store: Make, arena: Arena) -> None:
    store = make_store(event_query=address_of(libc.abs))  # abs(7) returns 7: an error code
    source = filled(arena, MiB)
    slot = store.reserve(MiB)
    write = store.write(slot, source.address, after_event=7)
    with pytest.raises(IOFailure, match="CUDA error 7"):
        write.wait(30)
    failed = write.failed()
    assert isinstance(failed, IOFailure) and failed.event_code == 7 and store.metrics.bytes_written == 0
    store.retire(slot, failed)
    assert not store.metrics.drives[0].retired, "the drive is not to blame"
    with pytest.raises(ValueError, match="its write failed"):
        store.read(slot, source.address)


def test_the_device_and_the_mode_of_capture_are_chosen_before_the_first_event(
    make_store: Make, arena: Arena, events: Events
) -> None:
    calls: list[Any] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    def set_device(device: int) -> int:
        calls.append((threading.get_ident(), "device", device))
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def exchange(mode: Any) -> int:
        calls.append((threading.get_ident(), "mode", mode[0]))
        return 0

    store = make_store(
        event_query=events.address,
        set_device=address_of(set_device),
        exchange_capture_mode=address_of(exchange),
        device=3,
    )
    source, slot = filled(arena, 4096), store.reserve(4096)
    assert store.write(slot, source.address).wait(30) and not calls, "without an event no device is touched"
    events.passed |= {1, 2}
    for event in (1, 2):
        assert store.write(slot, source.address, after_event=event).wait(30)
    (thread,) = events.threads
    assert calls == [(thread, "device", 3), (thread, "mode", RELAXED_CAPTURE)]


def test_a_device_that_cannot_be_chosen_fails_the_write(
    make_store: Make, arena: Arena, events: Events
) -> None:
    store = make_store(event_query=events.address, set_device=address_of(libc.abs), device=3)
    source = filled(arena, 4096)
    slot = store.reserve(4096)
    with pytest.raises(IOFailure, match="CUDA error 3"):
        store.write(slot, source.address, after_event=9).wait(30)
    assert store.write(slot, source.address).wait(30), "without an event no device is touched"


def test_an_event_needs_a_pool_that_can_ask_for_it(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source, slot = filled(arena, 4096), store.reserve(4096)
    with pytest.raises(ValueError, match="event_query"):
        store.write(slot, source.address, after_event=1)


@pytest.mark.parametrize("host_memory", [True, False], ids=["host", "device"])
def test_close_does_not_wait_longer_than_it_may_for_a_query_that_hangs(
    tmp_path: Path, arena: Arena, events: Events, host_memory: bool
) -> None:
    """1. a query does not return; 2. close gives up; 3. the query returns; 4. close ends the thread, nothing was written."""
    gate = threading.Event()
    events.before = lambda event: gate.wait(60)
    source = filled(arena, 4096)
    with (tmp_path / "slab").open("w+b") as file:
        pool = PythonPool(
            [(file.fileno(), False)],
            threads=1,
            host_threads=1,
            piece=MiB,
            make_error=ErrorMaker([str(tmp_path)]),
            make_transfer=None if host_memory else lambda: lambda operation, piece: 0,
            event_query=events.address,
        )
        write = pool.submit(*Request(WRITE, source.address, 4096, 0, [0, 0, 4096], event=1))
        assert eventually(lambda: bool(events.threads))
        assert not pool.close_within(0.05)
        gate.set()
        assert pool.close_within(30) and write.done()
        assert not file.read()
