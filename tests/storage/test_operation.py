"""What an operation promises: waiting, polling, cancelling, failing; forced into each race by `hold`."""

import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest

from ssdtrain.storage import Arena, IOCancelled, IOFailure, SpillStore, StoreClosed
from ssdtrain.storage.memory import Map, fill
from ssdtrain.storage.pieces import READ, WRITE
from tests.storage.conftest import blank, contents, filled, payload
from tests.support.filesystems import eventually

MiB = 1 << 20
Make = Callable[..., SpillStore]


def test_an_operation_is_done_when_it_says_so(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source = filled(arena, MiB)
    slot = store.reserve(MiB)
    store.pool.hold()
    write = store.write(slot, source.address)
    assert write.nbytes == MiB and not write.done() and write.failed() is None and write.seconds == 0
    assert write.wait(0) is False and write.wait(0.02) is False and not write.done()
    store.pool.release()
    assert write.wait() is True and write.done() and write.failed() is None and write.seconds > 0
    assert write.wait(0) is True and not write.cancel(), "too late"


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_a_cancelled_write_writes_nothing(make_store: Make, arena: Arena, tier: str) -> None:
    store = make_store(threads=1, host_bytes=64 * MiB if tier == "host" else 0)
    nbytes = 20 * MiB + 5
    first = filled(arena, nbytes, seed=1)
    slot = store.reserve(nbytes)
    assert slot.tier == tier
    assert store.write(slot, first.address).wait(30)
    first.release()
    second = filled(arena, nbytes, seed=2)
    store.pool.hold()
    write = store.write(slot, second.address)
    assert write.cancel() and write.cancel() and write.done()
    with pytest.raises(IOCancelled, match=str(nbytes)):
        write.wait()
    assert isinstance(write.failed(), IOCancelled)
    second.release()
    store.pool.release()
    # One worker serves writes in order: when this one is done, the worker has passed the cancelled one.
    marker, later = filled(arena, 1), store.reserve(1)
    assert later.tier == tier and store.write(later, marker.address).wait(30)
    assert contents(store, slot, arena) == payload(nbytes, 1)
    assert store.metrics.cancelled_io_bytes == nbytes and store.metrics.bytes_written == nbytes + 1


def test_a_cancelled_read_leaves_the_target_alone_and_its_memory_may_go(
    make_store: Make, arena: Arena
) -> None:
    store = make_store()
    source = filled(arena, 4 * MiB)
    slot = store.reserve(4 * MiB)
    assert store.write(slot, source.address).wait(30)
    memory = Map(4 * MiB)
    fill(memory.address, 0x55, 4 * MiB)
    store.pool.hold()
    read = store.read(slot, memory.address)
    assert read.cancel()
    memory.close()  # a transfer now would fail with EFAULT or hit whatever is mapped there next
    store.pool.release()
    assert contents(store, slot, arena) == payload(4 * MiB)
    assert isinstance(read.failed(), IOCancelled)


def test_an_operation_that_began_cannot_be_cancelled(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source = filled(arena, 30 * MiB)
    slot = store.reserve(30 * MiB)
    store.pool.hold(begun=True)
    write = store.write(slot, source.address)
    assert not write.done() and eventually(write.begun)
    assert not write.cancel() and not write.done()
    store.pool.release()
    assert write.wait(30)
    assert contents(store, slot, arena) == payload(30 * MiB)


def test_cancelling_and_beginning_race_to_one_winner(make_store: Make, arena: Arena) -> None:
    store = make_store(threads=2)
    sources = [filled(arena, 64 << 10, seed=1), filled(arena, 64 << 10, seed=2)]
    slot = store.reserve(64 << 10)
    won = 0
    for _ in range(150):
        assert store.write(slot, sources[0].address).wait(30)
        write = store.write(slot, sources[1].address)
        cancelled = write.cancel()
        if not cancelled:
            assert write.wait(30)
        won += cancelled
        assert contents(store, slot, arena) == payload(64 << 10, 1 if cancelled else 2)
    assert store.metrics.cancelled_io_bytes == won * (64 << 10)


def test_an_operation_may_be_dropped_in_flight(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source = filled(arena, 20 * MiB)
    slot = store.reserve(20 * MiB)
    store.pool.hold(begun=True)
    write = store.pool.submit(WRITE, source.address, 20 * MiB, 0, slot._extents)
    assert eventually(write.begun)
    del write
    gc.collect()
    store.pool.release()
    assert eventually(lambda: store.metrics.bytes_written == 20 * MiB)
    target = blank(arena, 20 * MiB)
    assert store.pool.submit(READ, target.address, 20 * MiB, 0, slot._extents).wait(30)
    assert bytes(target.view()) == payload(20 * MiB)


def test_many_threads_wait_for_one_operation(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source = filled(arena, MiB)
    slot = store.reserve(MiB)
    store.pool.hold()
    write = store.write(slot, source.address)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(write.wait(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    store.pool.release()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_waiting_releases_the_interpreter_and_hears_signals(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source = filled(arena, 4096)
    slot = store.reserve(4096)
    store.pool.hold()
    write = store.write(slot, source.address)

    class Heard(Exception):
        pass

    def raising(number: int, frame: object) -> None:
        raise Heard

    before = signal.signal(signal.SIGALRM, raising)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Heard):
            write.wait(60)
    finally:
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.02, store.pool.release).start()
    assert write.wait(60)


def test_reads_overtake_queued_writes(make_store: Make, arena: Arena) -> None:
    store = make_store(threads=1)
    source, target = filled(arena, MiB), blank(arena, MiB)
    stored = store.reserve(MiB)
    assert store.write(stored, source.address).wait(30)
    store.pool.hold(begun=True, reads=False)
    slots = [store.reserve(MiB) for _ in range(8)]
    writes = [store.write(slot, source.address) for slot in slots]
    assert eventually(writes[0].begun)
    # As many workers as may write are at it, and one is left.
    assert store.read(stored, target.address).wait(30)
    assert not writes[1].begun(), "one at a time was asked for"
    store.pool.release()
    assert all(write.wait(30) for write in writes)


def test_a_failure_says_where_what_and_what_to_do(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source, target = filled(arena, 5000), blank(arena, 5000)
    slot = store.reserve(5000)
    assert store.write(slot, source.address).wait(30)
    assert store.read(slot, target.address).wait(30)
    os.ftruncate(store._slabs[0].fd, 0)
    read = store.read(slot, target.address)
    with pytest.raises(IOFailure, match="ended early") as raised:
        read.wait(30)
    error = raised.value
    assert (error.errno, error.operation) == (5, "read") and error.nbytes >= 5000
    assert error.filename == store.metrics.drives[0].path
    assert (
        "read" in str(error)
        and error.filename in str(error)
        and "EIO" in str(error)
        and "dmesg" in str(error)
    )
    polled = read.failed()
    assert isinstance(polled, IOFailure) and str(polled) == str(error)


def test_a_closed_store_cancels_what_has_not_begun_and_ends_what_has(make_store: Make, arena: Arena) -> None:
    store = make_store(threads=1)
    sources = [filled(arena, MiB, seed=n) for n in range(3)]
    slots = [store.reserve(MiB) for _ in sources]
    store.pool.hold(begun=True)
    begun = store.write(slots[0], sources[0].address)
    assert eventually(begun.begun)
    queued = [store.write(slot, source.address) for slot, source in zip(slots[1:], sources[1:], strict=True)]
    store.close()
    store.close()
    assert begun.wait(0) and all(operation.done() for operation in queued)
    for operation in queued:
        with pytest.raises(IOCancelled):
            operation.wait()
    for call in (lambda: store.reserve(1), lambda: store.write(slots[0], sources[0].address)):
        with pytest.raises(StoreClosed, match="closed"):
            call()
    with pytest.raises(StoreClosed, match="closed"):
        store.read(slots[0], sources[0].address)
    store.free(slots[0])
    assert store.metrics.bytes_written == MiB
