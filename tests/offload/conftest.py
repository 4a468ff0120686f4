"""Variants of the engine that every test of it runs with, and the check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtrain.config import load_config
from ssdtrain.offload.policy import Action, ForwardProfile, SavedTensorInfo
from ssdtrain.offload.tensors.region import Region
from ssdtrain.runtime import Runtime, Seams
from tests.support.filesystems import eventually
from tests.support.filesystems import mounts as mounts  # a fixture
from tests.support.tiers import tiered

MIN_BYTES = 1024


@dataclass(frozen=True)
class Variant:
    """One way to run the engine."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    staged: bool = False
    slots: int | None = None
    drives: int = 1
    lagging: bool = False
    """On a device whose copies lag behind: see `tests.support.lagging`."""
    bound: int | None = None
    """Bytes in flight, with tensors that leave in order: see `ssdtrain.offload.pacing.limits`."""
    part: float | None = None
    """Of every region, what is offloaded; None: by the config."""


VARIANTS = [
    Variant("c"),
    Variant("python", {"engine": "python"}),
    # The way of device memory, through staging buffers; on the CPU its streams and events do nothing.
    Variant("staged", {"buffer": "64MiB"}, staged=True),
    # Room for two restored tensors and one store at a time.
    Variant("two-slots", {"in_flight": 1}, slots=2),
    Variant("staged-two-slots", {"buffer": "64MiB", "in_flight": 1}, staged=True, slots=2),
    Variant("host-tier", {"host": "1MiB"}),
    Variant("no-prefetch", {"prefetch": 0}),
    Variant("two-drives", drives=2),
]

LAGGING = Variant("lagging", lagging=True)

IN_PARTS = [
    Variant("parts", part=0.5),
    Variant("parts-staged", staged=True, part=0.25),
    Variant("parts-lagging", lagging=True, part=0.75),
]


class Parts:
    """Offloads these parts of regions, one after the other."""

    needs_modules = False

    def __init__(self, *parts: float, **action: Any) -> None:
        self._actions = [Action(True, part=part, **action) for part in parts]

    def decide(self, saved: SavedTensorInfo) -> Action:
        return self._actions[saved.position % len(self._actions)]

    def observe(self, forward: ForwardProfile) -> None:
        pass


def only_slots(runtime: Runtime, count: int) -> None:
    """Let the engine hold at most `count` buffers at a time."""
    buffers = runtime.engine.buffers
    acquire = buffers.acquire

    def acquire_few(nbytes: int, page_offset: int = 0) -> Any:
        arena = buffers._arena
        if arena is not None and arena.allocated and len(arena._allocator._taken) >= count:
            return None
        return acquire(nbytes, page_offset)

    buffers.acquire = acquire_few


def offload_parts(runtime: Runtime, *parts: float, **action: Any) -> None:
    """Let the engine offload these parts of regions, one after the other."""
    runtime.engine.policy = Parts(*parts, **action)


def watch_loads(runtime: Runtime) -> list[bool]:
    """Whether backward has asked for it already, for each load that begins from now on."""
    loads = runtime.engine.mover.loads
    begin, asked = loads.begin, []

    def begin_watched(region: Region, *, on_demand: bool) -> bool:
        if begun := begin(region, on_demand=on_demand):  # else there is no buffer now
            asked.append(on_demand)
        return begun

    loads.begin = begin_watched
    return asked


def open_files() -> set[str]:
    return {
        f"{fd}:{_link(fd)}"
        for fd in os.listdir("/proc/self/fd")
        if "deleted" in _link(fd) or "ssdtrain" in _link(fd)
    }


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _name_of(task: str) -> str:
    try:
        return Path(f"/proc/self/task/{task}/comm").read_text()
    except OSError:
        return ""  # a thread that ended meanwhile


def io_threads() -> int:
    native = sum(_name_of(task).startswith("ssdtrain") for task in os.listdir("/proc/self/task"))
    return native + sum(thread.name.startswith("ssdtrain") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test: no file and no thread of the engine's."""
    gc.collect()
    before, threads = open_files(), io_threads()
    # What is there already need not be looked at by every collection of this test.
    gc.freeze()
    yield
    gc.collect()
    assert open_files() <= before
    # The kernel lists a thread for a moment after it was joined.
    assert eventually(lambda: io_threads() <= threads)


MakeRuntime = Callable[..., Runtime]


@pytest.fixture
def make_runtime(tmp_path: Path) -> Iterator[MakeRuntime]:
    """Builds runtimes; at the end they must hold no region and no slot, and are closed."""
    made: list[Runtime] = []

    def make(variant: Variant = VARIANTS[0], **more: Any) -> Runtime:
        build = {key: more.pop(key) for key in ("faults", "checkpoint") if key in more}
        directories = [str(tmp_path / f"ssdtrain-{len(made)}-{drive}") for drive in range(variant.drives)]
        section = {
            "directories": directories,
            "amount": "all",
            "min_bytes": MIN_BYTES,
            **variant.options,
            **more,
        }
        config: dict[str, Any] = {"offload": section}
        if "checkpoint" in build:
            config["checkpoint"] = build.pop("checkpoint")
        seams = Seams(build.get("faults"), variant.staged or None)
        runtime = Runtime(load_config(config), seams=seams)
        runtime.engine.mover.stores.bound = variant.bound
        if variant.slots is not None:
            only_slots(runtime, variant.slots)
        if variant.part is not None:
            offload_parts(runtime, variant.part)
        made.append(runtime)
        return runtime

    yield make
    gc.collect()
    try:
        for runtime in made:
            if not getattr(runtime, "expects_live", False):
                holds_nothing(runtime)
    finally:
        for runtime in made:
            runtime.close()


def holds_nothing(runtime: Runtime) -> None:
    """No region, no slot, no buffer, nothing in flight: at once, but for what an operation under way still uses."""

    def left() -> tuple[int, ...]:
        found = runtime.statistics()
        assert found.offload.live_regions == 0
        return found.store.live_slots, found.offload.in_flight_bytes, runtime.engine.buffers.allocated

    assert eventually(lambda: not any(left())), f"slots, bytes in flight and buffers left: {left()}"


def settled(runtime: Runtime) -> None:
    """Wait until every store has ended."""
    ended = eventually(lambda: not runtime.statistics().offload.in_flight_bytes)
    assert ended, "a store never ended"


@contextmanager
def stored_forward(runtime: Runtime) -> Iterator[Any]:
    """A forward after which every store has ended: none is cancelled because backward came first."""
    with runtime.forward() as tape:
        yield tape
    settled(runtime)


@pytest.fixture(
    params=tiered(VARIANTS, quick=[v for v in VARIANTS if v.name in ("c", "staged", "staged-two-slots")]),
    ids=lambda variant: variant.name,
)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Bits are compared: the same threads and the same seed on both sides."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
