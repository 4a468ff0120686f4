"""What every storage test runs under: both engines, and a check that no descriptor, thread or live slot stays behind."""

import functools
import gc
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssdtrain.storage import Arena, Lease, SpillStore
from tests.support.filesystems import eventually
from tests.support.filesystems import mounts as mounts  # a fixture
from tests.support.tiers import tiered


def counts() -> tuple[int, int]:
    """(open descriptors, threads) of this process, C threads included."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = counts()
    yield

    def left() -> list[bool]:
        found = [now > then for now, then in zip(counts(), before, strict=True)]
        if any(found):
            gc.collect()
        return found

    # A joined thread may show in /proc for a moment longer.
    assert eventually(lambda: not any(left())), f"the test left (open descriptors, threads): {left()}"


@pytest.fixture(params=tiered(["c", "python"], quick=["c"]))
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "c" and not list(
        Path(sys.modules[SpillStore.__module__].__file__ or "").parent.glob("_iopool*.so")
    ):
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler is None, f"there is a compiler ({compiler}) but the C engine was not built"
        pytest.skip("the C engine was not built: this machine has no C compiler")
    return str(request.param)


only_c = pytest.mark.parametrize("engine", ["c"], indirect=True)
"""For tests of what the C engine alone has: injected faults, deferral, a second worker for a backlog."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 << 20)
    yield made
    made.close(force=True)


@pytest.fixture
def make_store(tmp_path: Path, engine: str) -> Iterator[Callable[..., SpillStore]]:
    """Makes stores on `drives` directories, and closes them."""
    made: list[SpillStore] = []

    def make(drives: int = 1, **settings: object) -> SpillStore:
        directories = [tmp_path / f"drive{n}" for n in range(drives)]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        settings.setdefault("capacity", 256 << 20)
        settings.setdefault("engine", engine)
        made.append(SpillStore(directories, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for store in made:
        store.close()


@functools.cache
def noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(65537)


def payload(nbytes: int, seed: int = 1) -> bytes:
    """Bytes of which no two blocks of 4096 are alike, different for every seed."""
    block = noise(seed)
    return (block * (nbytes // len(block) + 1))[:nbytes]


def filled(arena: Arena, nbytes: int, *, page_offset: int = 0, seed: int = 1) -> Lease:
    lease = arena.acquire(nbytes, page_offset=page_offset)
    lease.view()[:] = payload(nbytes, seed)
    return lease


def blank(arena: Arena, nbytes: int, *, page_offset: int = 0) -> Lease:
    lease = arena.acquire(nbytes, page_offset=page_offset)
    lease.view()[:] = b"\xaa" * nbytes
    return lease


def contents(store: SpillStore, slot: object, arena: Arena) -> bytes:
    """What a slot holds, read back."""
    lease = blank(arena, slot.nbytes)  # type: ignore[attr-defined]
    assert store.read(slot, lease.address).wait(30)  # type: ignore[arg-type]
    data = bytes(lease.view())
    lease.release()
    return data


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python on a script; kills and reaps what is left at the end of the test."""
    running: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()
