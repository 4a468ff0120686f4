"""What becomes of the drive, the workers and the data when processes end, are killed, or fork."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ssdtrain
from ssdtrain.storage import Arena, Faults, SpillStore, StoreClosed, forks
from tests.storage.conftest import blank, contents, filled, payload
from tests.support.filesystems import Mounts, eventually, free_bytes
from tests.support.tiers import tiered

MiB = 1 << 20
Spawn = Callable[..., "subprocess.Popen[str]"]

# Storage needs no torch, and a process that never imports it starts ten times as fast.
WORKING = f"""
    import signal, sys, threading, time, types
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
    engine = sys.modules["ssdtrain"] = types.ModuleType("ssdtrain")
    engine.__path__ = {list(ssdtrain.__path__)!r}
    from ssdtrain.storage import Arena, Faults, SpillStore
    store = SpillStore([sys.argv[1]], engine=sys.argv[2], capacity=48 << 20, threads=2,
                       faults=Faults(delay=0.5, max_delay=0.02) if sys.argv[2] == "c" else None)
    assert "torch" not in sys.modules
    arena = Arena(8 << 20)
    lease = arena.acquire(8 << 20)
    slots = [store.reserve(4 << 20) for _ in range(10)]
    def work():
        while True:
            for slot in slots:
                store.write(slot, lease.address)
            store.write(slots[0], lease.address).wait()
"""


@pytest.mark.parametrize("moment", tiered([0.0, 0.01, 0.03, 0.07], quick=[0.03]))
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_killed_process_leaves_no_space_and_no_name(
    mounts: Mounts, spawn: Spawn, engine: str, end: signal.Signals, moment: float
) -> None:
    mount = mounts.small(64 * MiB)
    empty = free_bytes(mount)
    process = spawn(WORKING + "    print('working', flush=True)\n    work()\n", mount, engine)
    assert process.stdout.readline() == "working\n"
    time.sleep(moment)
    assert free_bytes(mount) <= empty - 40 * MiB and os.listdir(mount) == []
    process.send_signal(end)
    assert process.wait(30) != 0
    assert eventually(lambda: free_bytes(mount) == empty)
    assert os.listdir(mount) == []


@pytest.mark.long
def test_a_hundred_kills_at_any_moment_leave_nothing(mounts: Mounts, spawn: Spawn, engine: str) -> None:
    mount = mounts.small(64 * MiB)
    empty = free_bytes(mount)
    draw = random.Random(2)
    for _ in range(100):
        process = spawn(WORKING + "    work()\n", mount, engine)
        time.sleep(draw.uniform(0.0, 0.5))  # from before the first import to the middle of the work
        process.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        process.communicate(timeout=60)
        assert eventually(lambda: free_bytes(mount) == empty) and os.listdir(mount) == []


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "    sys.exit(0)\n",
        "    threading.Thread(target=lambda: [store.write(s, lease.address) for s in slots * 5]).start()\n",
        "    store.pool.hold()\n    store.write(slots[0], lease.address)\n",
        "    store.pool.hold(begun=True)\n    store.write(slots[0], lease.address)\n    time.sleep(0.05)\n",
        "    operation = store.write(slots[0], lease.address)\n    del store, arena\n",
    ],
    ids=["end", "sys.exit", "thread", "held", "held-begun", "dropped"],
)
def test_an_interpreter_that_exits_with_work_in_flight_ends_cleanly(
    spawn: Spawn, tmp_path: Path, engine: str, ending: str
) -> None:
    script = (
        WORKING + "    for slot in slots * 3:\n        last = store.write(slot, lease.address)\n" + ending
    )
    process = spawn(script, tmp_path, engine)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    assert os.listdir(tmp_path) == []


def test_an_unhandled_exception_ends_the_process_with_its_traceback(
    spawn: Spawn, tmp_path: Path, engine: str
) -> None:
    process = spawn(
        WORKING + "    store.write(slots[0], lease.address)\n    raise KeyError('mine')\n", tmp_path, engine
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "KeyError: 'mine'" in err and err.count("Traceback") == 1


def in_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; its exit code, 0 when the body returned."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException as error:  # noqa: BLE001 the child must not return into pytest
            print(repr(error), file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except StoreClosed as error:
        assert "fork" in str(error)
        return
    raise AssertionError("the child could use its parent's object")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_fails_in_a_forked_child_keeps_nobody_else_from_hearing_of_it() -> None:
    class Tracked:
        told = False

        def after_fork(self) -> None:
            self.told = True
            raise OSError("cannot be closed")

    tracked = [Tracked() for _ in range(3)]
    for one in tracked:
        forks.track(one)

    def child() -> None:
        assert all(one.told for one in tracked)

    assert in_child(child) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_with_transfers_in_flight_has_nothing_and_hurts_nothing(
    make_store: Callable[..., SpillStore], engine: str, arena: Arena
) -> None:
    faults = Faults(delay=0.3, max_delay=0.01) if engine == "c" else None
    store = make_store(host_bytes=4 * MiB, faults=faults)
    sizes = [4 * MiB] + [3 * MiB] * 6
    sources = [filled(arena, n, page_offset=64, seed=i) for i, n in enumerate(sizes)]
    slots = [store.reserve(n) for n in sizes]
    assert slots[0].tier == "host"
    writes = [store.write(slot, source.address) for slot, source in zip(slots, sources, strict=True)]
    store.pool.hold()
    held = store.write(slots[1], sources[1].address)

    def child() -> None:
        for fd in [slab.fd for slab in store._slabs]:
            assert fd == -1
        refused(lambda: store.reserve(1))
        refused(lambda: store.write(slots[1], sources[1].address))
        refused(lambda: store.read(slots[1], sources[1].address))
        refused(lambda: arena.acquire(1))
        refused(held.done)
        refused(lambda: held.wait(1))
        refused(held.cancel)
        refused(held.failed)
        refused(store.pool.release)
        for slot in slots:
            store.free(slot)
        for source in sources:
            source.release()
        arena.close()
        store.close()
        store.pool.close()

    for _ in range(3):
        assert in_child(child) == 0
    store.pool.release()
    assert all(write.wait(30) for write in [*writes, held])
    for i, (slot, source) in enumerate(zip(slots, sources, strict=True)):
        assert contents(store, slot, arena) == payload(sizes[i], i)
        store.free(slot)
        source.release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forks_during_reads_corrupt_nothing(make_store: Callable[..., SpillStore], arena: Arena) -> None:
    store = make_store()
    source = filled(arena, 10 * MiB, page_offset=64)
    slot = store.reserve(10 * MiB)
    assert store.write(slot, source.address).wait(30)
    for page_offset in (64, 0) * 4:
        target = blank(arena, 10 * MiB, page_offset=page_offset)
        read = store.read(slot, target.address)
        assert in_child(lambda: None) == 0
        assert read.wait(30) and bytes(target.view()) == payload(10 * MiB)
        target.release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_living_child_does_not_hold_the_space(mounts: Mounts, engine: str, arena: Arena) -> None:
    mount = mounts.small(16 * MiB)
    empty = free_bytes(mount)
    with SpillStore([mount], engine=engine, capacity=8 * MiB) as store:
        store.reserve(4 * MiB)
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    assert free_bytes(mount) == empty, "the child still holds the spill file"
    os.write(go[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for fd in (*ready, *go):
        os.close(fd)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_may_make_a_store_of_its_own(
    make_store: Callable[..., SpillStore], tmp_path: Path, engine: str
) -> None:
    make_store()

    def child() -> None:
        arena = Arena(4 * MiB)
        with SpillStore([tmp_path], engine=engine, capacity=8 * MiB) as store:
            source = filled(arena, MiB)
            slot = store.reserve(MiB)
            assert store.write(slot, source.address).wait(30)
            assert contents(store, slot, arena) == payload(MiB)

    assert in_child(child) == 0


def test_a_started_program_inherits_no_spill_file(make_store: Callable[..., SpillStore]) -> None:
    store = make_store()
    inode = os.fstat(store._slabs[0].fd).st_ino
    command = ["ls", "-liL", "/proc/self/fd"]
    listed = subprocess.run(command, capture_output=True, text=True, close_fds=False)
    assert listed.stdout and str(inode) not in listed.stdout.split()
