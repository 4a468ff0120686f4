"""The store: tiers in their order, full and failing drives, release under way, figures, poison."""

import errno
import gc
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.storage import ALIGNMENT, Arena, Faults, IOFailure, SpillStore, StoreFull, slab
from ssdtrain.storage.pieces import COPY_OUT, READ
from ssdtrain.storage.python_engine import PythonPool
from ssdtrain.storage.store import FREE_BATCH
from tests.storage.conftest import contents, filled, only_c, payload
from tests.support.filesystems import Mounts, eventually, free_bytes

MiB = 1 << 20
Make = Callable[..., SpillStore]


def test_the_host_tier_is_taken_first_then_the_emptiest_drive(make_store: Make) -> None:
    store = make_store(2, host_bytes=2 * MiB)
    slots = [store.reserve(MiB) for _ in range(6)]
    assert [slot.tier for slot in slots] == ["host"] * 2 + ["ssd"] * 4
    assert sorted(slot.drive for slot in slots[2:]) == [0, 0, 1, 1]
    store.free(slots[0])
    small = store.reserve(10)
    assert small.tier == "host"
    store.free(slots[3])
    emptied = slots[3].drive
    again = store.reserve(2 * MiB)
    assert again.drive == emptied


def test_capacity_is_a_limit_and_the_error_has_the_figures(make_store: Make) -> None:
    store = make_store(2, capacity=4 * MiB, host_bytes=2 * MiB)
    slots = []
    with pytest.raises(StoreFull) as raised:
        while True:
            slots.append(store.reserve(MiB))
    error = raised.value
    assert len(slots) == 2 + 2 * 3, "a slot on a drive takes its bytes and a block for its edges"
    assert error.requested == MiB and error.capacity == 8 * MiB and 0 < error.free < 2 * MiB
    for drive in store._slabs:
        assert str(drive.directory) in str(error) and os.fstat(drive.fd).st_size <= 4 * MiB
    store.free(slots[-1])
    slots[-1] = store.reserve(MiB)
    for slot in slots:
        store.free(slot)
    whole = store.reserve(4 * MiB - ALIGNMENT)
    assert whole.nbytes, "freed slots join again"


def test_without_a_capacity_ranks_share_most_of_the_free_space(tmp_path: Path, engine: str) -> None:
    with SpillStore([tmp_path], engine=engine, local_world_size=4) as store:
        figures = os.statvfs(tmp_path)
        share = figures.f_bavail * figures.f_frsize * 0.9 / 4
        assert abs(store.metrics.capacity_bytes / share - 1) < 0.1


def test_a_full_file_system_is_full_and_gets_everything_back(
    make_store: Make, mounts: Mounts, engine: str, arena: Arena
) -> None:
    mount = mounts.small(8 * MiB)
    empty = free_bytes(mount)
    with SpillStore([mount], engine=engine, capacity=1 << 40) as store:
        slots = []
        with pytest.raises(StoreFull, match=str(mount)):
            while True:
                slots.append(store.reserve(MiB))
        assert len(slots) >= 6
        source = filled(arena, MiB)
        for slot in slots:
            assert store.write(slot, source.address).wait(30)
        for slot in slots:
            assert contents(store, slot, arena) == payload(MiB)
            store.free(slot)
        source.release()
        assert os.listdir(mount) == [], "the spill file has no name"
    assert free_bytes(mount) == empty


def test_when_one_of_two_drives_is_full_the_other_takes_all(
    mounts: Mounts, tmp_path: Path, engine: str, arena: Arena
) -> None:
    mount = mounts.small(4 * MiB)
    with SpillStore([mount, tmp_path], engine=engine, capacity=64 * MiB, stripe=MiB) as store:
        sources = [filled(arena, 5 * MiB, seed=n) for n in range(5)]
        slots = [store.reserve(5 * MiB) for _ in sources]
        for slot, source in zip(slots, sources, strict=True):
            assert store.write(slot, source.address).wait(30)
        assert all(drive.bytes_written > 0 for drive in store.metrics.drives)
        for n, slot in enumerate(slots):
            assert contents(store, slot, arena) == payload(5 * MiB, n)
            store.free(slot)
            sources[n].release()


def test_space_that_only_shows_full_when_written_fails_that_write(
    mounts: Mounts, engine: str, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mounts.small(4 * MiB)
    monkeypatch.setattr("ssdtrain.storage.slab.preallocate", lambda fd, offset, nbytes: 95)  # EOPNOTSUPP
    with SpillStore([mount], engine=engine, capacity=64 * MiB) as store:
        slot = store.reserve(16 * MiB)
        source = filled(arena, 16 * MiB)
        with pytest.raises(IOFailure, match="No space left on device") as raised:
            store.write(slot, source.address).wait(30)
        assert raised.value.filename == str(mount) and "capacity" in str(raised.value)


def test_an_injected_full_drive_is_passed_over(make_store: Make) -> None:
    store = make_store(2, faults=Faults(full_after=2 * MiB, full_drive=0))
    slots = [store.reserve(MiB) for _ in range(5)]
    assert [slot.drive for slot in slots].count(0) == 1
    full = store._slabs[0]
    assert os.fstat(full.fd).st_size == full.allocator.size < 2 * MiB, "a partial allocation was kept"


@only_c
def test_a_retired_drive_takes_nothing_new_and_keeps_what_it_has(
    make_store: Make, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(2, faults=Faults(fail_writes=frozenset({1})))
    source = filled(arena, MiB)
    kept, failing = store.reserve(MiB), store.reserve(MiB)
    assert store.write(kept, source.address).wait(30)
    with pytest.raises(IOFailure) as raised:
        store.write(failing, source.address).wait(30)
    with caplog.at_level(logging.WARNING):
        store.retire(failing, raised.value)
        store.retire(failing, raised.value)
    assert len(caplog.records) == 1 and str(raised.value.filename) in caplog.text
    assert [drive.retired for drive in store.metrics.drives] == [failing.drive == 0, failing.drive == 1]
    later = [store.reserve(MiB) for _ in range(3)]
    assert {slot.drive for slot in later} == {kept.drive}
    store.retire(kept, OSError("another"))
    with pytest.raises(StoreFull, match="retired"):
        store.reserve(1)
    assert contents(store, kept, arena) == payload(MiB)


def test_a_drive_that_fails_while_its_file_grows_is_passed_over(
    make_store: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(2, stripe=MiB)
    failing = store._slabs[1].fd
    real = slab.preallocate
    monkeypatch.setattr(
        slab, "preallocate", lambda fd, at, size: errno.EIO if fd == failing else real(fd, at, size)
    )
    slots = [store.reserve(4 * MiB) for _ in range(3)]
    assert {tuple(map(str, store.directories(slot))) for slot in slots} == {(store.metrics.drives[0].path,)}
    assert [drive.retired for drive in store.metrics.drives] == [
        False,
        True,
    ] and "Input/output error" in caplog.text
    for slot in slots:
        store.free(slot)
    assert store.metrics.drives[0].used == 0, "what was taken for the first, failed attempt is free again"


@only_c
def test_of_a_striped_slot_only_the_drive_that_failed_is_retired(make_store: Make, arena: Arena) -> None:
    store = make_store(3, stripe=MiB, faults=Faults(fail_writes=frozenset({0})))
    source = filled(arena, 9 * MiB)
    slot = store.reserve(9 * MiB)
    with pytest.raises(IOFailure) as raised:
        store.write(slot, source.address).wait(30)
    store.retire(slot, raised.value)
    assert [drive.path for drive in store.metrics.drives if drive.retired] == [raised.value.filename]


def test_a_freed_slot_is_not_reused_before_its_transfer_ended(make_store: Make, arena: Arena) -> None:
    store = make_store(capacity=2 * MiB)
    source = filled(arena, MiB, seed=1)
    slot = store.reserve(MiB)
    store.pool.hold(begun=True)
    write = store.write(slot, source.address)
    while not write.begun():
        pass
    store.free(slot)
    store.free(slot)
    with pytest.raises(StoreFull):
        store.reserve(MiB)
    assert store.metrics.live_slots == 1
    store.pool.release()
    assert write.wait(30)
    store.reserve(MiB)


def test_freeing_cancels_a_queued_transfer(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source = filled(arena, MiB)
    slot = store.reserve(MiB)
    store.pool.hold()
    write = store.write(slot, source.address)
    store.free(slot)
    assert write.done() and store.metrics.live_slots == 0 and store.metrics.cancelled_io_bytes == MiB
    store.pool.release()


def test_ctrl_c_in_the_middle_of_a_release_gives_no_space_twice(
    make_store: Make, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    slab, slot, other = store._slabs[0], store.reserve(4096), store.reserve(4096)
    give = slab.release

    def interrupted(offset: int) -> int:
        give(offset)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slab, "release", interrupted)
        store.free(slot)
        with pytest.raises(KeyboardInterrupt):
            store.reserve(4096)
    store.free(other)
    assert store.metrics.drives[0].used == slab.used == 0
    store.close()


def test_nothing_freed_counts_as_live_after_close(make_store: Make) -> None:
    store = make_store()
    slot = store.reserve(4096)
    store.free(slot)
    store.close()
    assert store.metrics.live_slots == 0 and store.metrics.drives[0].used == 0


def test_slots_freed_one_after_the_other_are_given_back_together(make_store: Make) -> None:
    store = make_store()
    slots = [store.reserve(4096) for _ in range(FREE_BATCH)]
    used = store._slabs[0].used
    for slot in slots[:-1]:
        store.free(slot)
    assert store._slabs[0].used == used, "each by itself costs backward more"
    store.free(slots[-1])
    assert store._slabs[0].used == 0


def test_freeing_inside_a_locked_section_does_not_wait(make_store: Make) -> None:
    """A finalizer may free a slot on the thread that holds the store's lock."""
    store = make_store()

    class Owner:
        def __init__(self) -> None:
            self.slot = store.reserve(MiB)
            self.cycle = self

        def __del__(self) -> None:
            store.free(self.slot)

    owner = Owner()
    others = [store.reserve(4096) for _ in range(FREE_BATCH - 1)]
    for slot in others:
        store.free(slot)
    del owner
    with store._lock:
        gc.collect()  # one more would be looked through together with the others
    assert store.metrics.live_slots == 0


def test_a_freed_or_unwritten_slot_cannot_be_read(make_store: Make, arena: Arena) -> None:
    store = make_store()
    target = filled(arena, 10)
    slot = store.reserve(10)
    with pytest.raises(ValueError, match="never written"):
        store.read(slot, target.address)
    assert store.write(slot, target.address).wait(30)
    store.free(slot)
    for call in (store.read, store.write):
        with pytest.raises(ValueError, match="freed"):
            call(slot, target.address)


class FailsOnceAsked:
    """A write that fails right after the first question about it."""

    checksum = digest = 0

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        over, self.over = self.over, True
        return over

    def failed(self) -> IOFailure | None:
        over, self.over = self.over, True
        return IOFailure(errno.EIO, "no more", "drive", "write", 0, 10) if over else None


def test_a_write_that_fails_while_it_is_asked_about_is_not_read(make_store: Make, arena: Arena) -> None:
    store = make_store()
    target = arena.acquire(10)
    slot = store.reserve(10)
    slot._writes = ((FailsOnceAsked(), 0),)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="its write failed"):
        store.read(slot, target.address)


def test_a_short_file_is_an_error_and_never_zeros(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source = filled(arena, 9 * MiB)
    slot = store.reserve(9 * MiB)
    assert store.write(slot, source.address).wait(30)
    for left in (4 * MiB, 100, 0):
        os.ftruncate(store._slabs[0].fd, left)
        with pytest.raises(IOFailure, match="ended early"):
            store.read(slot, source.address).wait(30)


def test_a_directory_on_an_overlay_works(tmp_path: Path, engine: str, arena: Arena) -> None:
    parts = {name: tmp_path / name for name in ("lowerdir", "upperdir", "workdir")}
    for path in (*parts.values(), tmp_path / "merged"):
        path.mkdir()
    options = ",".join(f"{name}={path}" for name, path in parts.items())
    command = ["mount", "-t", "overlay", "-o", options, "overlay", str(tmp_path / "merged")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"an overlay needs the right to mount: {done.stderr.strip()}")
    try:
        with SpillStore([tmp_path / "merged"], engine=engine, capacity=8 * MiB) as store:
            source = filled(arena, MiB, page_offset=64)
            slot = store.reserve(MiB)
            assert store.write(slot, source.address).wait(30)
            assert contents(store, slot, arena) == payload(MiB)
            assert os.listdir(tmp_path / "merged") == os.listdir(parts["upperdir"]) == []
            source.release()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "merged")], check=True)


def test_a_removed_directory_does_not_hurt(make_store: Make, arena: Arena, tmp_path: Path) -> None:
    store = make_store()
    (tmp_path / "drive0").rmdir()
    source = filled(arena, MiB)
    slot = store.reserve(MiB)
    assert store.write(slot, source.address).wait(30)
    assert contents(store, slot, arena) == payload(MiB)


def test_the_figures_add_up(make_store: Make, arena: Arena, engine: str) -> None:
    store = make_store(2, host_bytes=4 * MiB, stripe=MiB)
    source = filled(arena, 3 * MiB)
    host, ssd = store.reserve(3 * MiB), store.reserve(3 * MiB)
    for slot in (host, ssd):
        assert store.write(slot, source.address).wait(30)
        assert contents(store, slot, arena) == payload(3 * MiB)
    stats = store.metrics
    assert stats.engine == engine and (stats.live_slots, stats.live_bytes) == (2, 6 * MiB)
    assert stats.bytes_written == stats.bytes_read == 6 * MiB and stats.cancelled_io_bytes == 0
    assert stats.ssd_bytes_written == stats.ssd_bytes_read == 3 * MiB
    assert stats.host.bytes_written == 3 * MiB == stats.host.used
    assert stats.write_seconds > 0 and stats.read_seconds > 0
    assert stats.capacity_bytes == 2 * (256 << 20) + 4 * MiB
    store.free(host)
    store.free(ssd)
    stats = store.metrics
    assert (stats.live_slots, stats.live_bytes, stats.host.used if stats.host else 0) == (0, 0, 0)
    assert all(drive.used == 0 for drive in stats.drives)


@pytest.mark.parametrize("host", [0, 4 * MiB], ids=["drive", "host"])
def test_freed_slots_are_poisoned_when_asked_for(
    make_store: Make, arena: Arena, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSDTRAIN_POISON", "1")
    store = make_store(host_bytes=host)
    source, target = filled(arena, MiB, page_offset=64), filled(arena, MiB, page_offset=64)
    slot = store.reserve(MiB)
    assert store.write(slot, source.address).wait(30)
    store.free(slot)
    again = store.reserve(MiB)
    assert (again.address, again._extents) == (slot.address, slot._extents), "the same place"
    kind = COPY_OUT if host else READ
    extents = again._extents or (1, again.address, MiB)  # behind the queue of the only drive
    page_offset = 0 if host else 64
    assert store.pool.submit(kind, target.address, MiB, page_offset, extents).wait(30)
    assert bytes(target.view()) == b"\xff" * MiB


@only_c
def test_closing_from_several_threads_closes_once(make_store: Make, arena: Arena) -> None:
    store = make_store(faults=Faults(delay=1.0, max_delay=0.05))
    source = filled(arena, 20 * MiB)
    slots = [store.reserve(20 * MiB) for _ in range(3)]
    for slot in slots:
        store.write(slot, source.address)
    threads = [threading.Thread(target=store.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_forgotten_store_closes_itself(make_store: Make, tmp_path: Path, engine: str, arena: Arena) -> None:
    source = filled(arena, MiB)
    store = SpillStore([tmp_path], engine=engine, capacity=4 * MiB)
    fd = store._slabs[0].fd
    store.write(store.reserve(MiB), source.address)
    del store
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_store_that_is_collected_on_one_of_its_workers_ends_them_before_it_closes_its_files(
    tmp_path: Path, arena: Arena
) -> None:
    """A worker writes to a descriptor, whose number the next file that is opened gets."""
    source = filled(arena, MiB)
    stores = [SpillStore([tmp_path], engine="python", capacity=4 * MiB)]
    pool, slab = stores[0].pool, stores[0]._slabs[0]
    assert isinstance(pool, PythonPool)
    run, closed_early, close = pool._run, [], slab.close

    def collected(*arguments: Any) -> Any:
        stores.clear()
        return run(*arguments)

    def close_file() -> None:
        closed_early.append(sum(thread.is_alive() for thread in pool._threads))
        close()

    pool._run = collected  # type: ignore[method-assign]
    slab.close = close_file  # type: ignore[method-assign]
    stores[0].write(stores[0].reserve(MiB), source.address)
    assert eventually(lambda: slab.fd < 0)
    assert closed_early == [0], "workers were alive when their file was closed"


@pytest.mark.parametrize(
    "settings",
    [
        {"direct": "maybe"},
        {"engine": "rust"},
        {"local_world_size": 0},
        {"host_bytes": -1},
        {"stripe": 100},
        {"capacity": 1},
        {"threads": 0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        SpillStore([tmp_path], **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="directory or a host tier"):
        SpillStore([])
