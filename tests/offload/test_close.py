"""close() with transfers under way, and from where it cannot wait."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ssdtrain.offload import engine as engine_module
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.transfer.state import State
from ssdtrain.runtime import Runtime
from ssdtrain.storage import Arena, SpillStore, holds_signal_safe_lock, signal_safe_lock
from tests.offload.conftest import MakeRuntime, Variant, stored_forward
from tests.offload.test_races import pool_of
from tests.support.filesystems import eventually

DEPTH = 4
WAYS = [
    Variant("c"),
    Variant("python", {"engine": "python"}),
    Variant("staged", {"buffer": "64MiB"}, staged=True),
]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


@pytest.fixture
def closed_runtime(make_runtime: MakeRuntime) -> Iterator[MakeRuntime]:
    """As `make_runtime`, for runtimes that the test closes: slots that are freed afterwards are not counted any more."""
    made: list[Runtime] = []

    def make(way: Variant = WAYS[0], **settings: Any) -> Runtime:
        runtime = make_runtime(way, **{"prefetch": "1MiB", **settings})
        runtime.expects_live = True
        made.append(runtime)
        return runtime

    yield make
    for runtime in made:
        if not runtime.engine.prefetcher.closed:
            pool_of(runtime).release()  # of a test that failed: its close would wait for ever


def model() -> tuple[torch.nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(DEPTH)]), torch.randn(64, 64)


def loads_held(runtime: Runtime) -> tuple[torch.nn.Sequential, torch.Tensor]:
    """A model, and its loss, with loads ahead of backward that do not begin until the pool is released."""
    layers, x = model()
    with stored_forward(runtime):
        loss = layers(x).square().mean()
    pool_of(runtime).hold(writes=False)
    engine = runtime.engine
    engine.prefetch(next(tape for known in runtime.offload._tapes.values() if (tape := known()) is not None))
    assert sum(region.transfer.state is State.LOADING for region in engine.mover.busy()) > 1
    return layers, loss


@ways
@pytest.mark.parametrize("deadline", ["0s", "1ms", "10s"])
def test_loads_ahead_are_waited_for_however_short_the_deadline(
    closed_runtime: MakeRuntime, way: Variant, deadline: str
) -> None:
    plain, x = model()
    plain(x).square().mean().backward()
    runtime = closed_runtime(way, deadline=deadline, threads=1)
    layers, loss = loads_held(runtime)
    slow = threading.Timer(0.2, pool_of(runtime).release)
    slow.start()
    runtime.close()
    slow.join()
    loss.backward()
    for one, other in zip(plain.parameters(), layers.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@ways
def test_a_load_that_the_end_of_the_store_cancelled_is_an_error(
    closed_runtime: MakeRuntime, way: Variant
) -> None:
    """The store may end without the engine: at interpreter exit, or by its owner."""
    runtime = closed_runtime(way)
    layers, loss = loads_held(runtime)
    runtime.offload.store.close()
    with pytest.raises(RuntimeError, match="close it after backward"):
        loss.backward()
    assert all(parameter.grad is None for parameter in layers.parameters())


@ways
def test_a_store_that_close_cancelled_is_in_memory_still(closed_runtime: MakeRuntime, way: Variant) -> None:
    runtime = closed_runtime(way, deadline="0s", in_flight="64MiB")
    x = torch.randn(64, 64, requires_grad=True)
    pool_of(runtime).hold()
    with runtime.forward():
        loss = (x * 2).sin().sum()
    assert runtime.engine.snapshot().in_flight_bytes
    runtime.close()
    loss.backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)
    assert runtime.engine.snapshot().offloaded_bytes == 0


def test_the_arena_is_unmapped_when_the_last_tensor_in_it_has_died(closed_runtime: MakeRuntime) -> None:
    runtime = closed_runtime(prefetch=0)
    layers, x = model()
    with stored_forward(runtime):
        loss = layers(x).square().mean()
    square = loss.grad_fn.next_functions[0][0]
    saved = square._saved_self
    arena = runtime.engine.buffers._arena
    assert arena.allocated
    runtime.close()
    assert arena.mapped, "the tensor lies there"
    assert runtime.engine.snapshot().buffer_bytes == arena.capacity
    del saved
    assert not arena.mapped
    assert runtime.engine.snapshot().buffer_bytes == 0


def test_a_second_close_on_another_thread_leaves_the_store_open_until_the_first_has_waited(
    closed_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store unmaps a device may still copy to or from."""
    runtime = closed_runtime()
    offload, engine, waits, over = runtime.offload, runtime.engine, threading.Event(), threading.Event()
    close_engine, close_store, early = engine.close, offload._close_store, []

    def close_first() -> None:
        first = not engine.prefetcher.closed
        close_engine()
        if first:
            waits.set()
            assert over.wait(20)

    def close_tiers() -> None:
        early.append(not over.is_set())
        close_store()

    monkeypatch.setattr(engine, "close", close_first)
    monkeypatch.setattr(offload, "_close_store", close_tiers)
    threads = [threading.Thread(target=runtime.close) for _ in range(2)]
    threads[0].start()
    assert waits.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    over.set()
    for thread in threads:
        thread.join()
    assert early and not any(early)


def with_a_store_of_a_dropped_graph(runtime: Runtime) -> Arena:
    """A store has begun, which the pool holds up, and its graph is dropped. Returns the arena that it is written from."""
    engine = runtime.engine
    pool_of(runtime).hold(begun=True)
    x = torch.randn(64, 64, requires_grad=True)
    with runtime.forward():
        loss = x.sin().sum()
    (store,) = [region.transfer.operation for region in engine.mover.stores]
    assert eventually(store.begun)
    del loss
    arena = engine.buffers._arena
    return arena


def test_the_arena_is_unmapped_also_where_stores_end_after_the_engine(closed_runtime: MakeRuntime) -> None:
    """1. a store has begun; 2. its graph is dropped; 3. the engine does not wait for it; 4. the end of the store does."""
    runtime = closed_runtime(WAYS[2], deadline="0s")
    engine, pool = runtime.engine, pool_of(runtime)
    arena = with_a_store_of_a_dropped_graph(runtime)
    engine.close()
    assert arena.mapped, "it is written from there"
    pool.release()
    runtime.close()
    assert not arena.mapped


@pytest.mark.parametrize("failing", ["detach", "engine", "store"])
def test_every_part_is_closed_whatever_one_of_them_raises(
    closed_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """As above, and one part of closing fails when it has done its work."""
    runtime = closed_runtime(WAYS[2], deadline="0s")
    engine, pool, feature = runtime.engine, pool_of(runtime), runtime.offload
    store = feature.store
    arena = with_a_store_of_a_dropped_graph(runtime)
    feature.detach()
    holder: Any = engine if failing == "engine" else feature
    name = {"detach": "detach", "engine": "close", "store": "_close_store"}[failing]
    whole = getattr(holder, name)

    def fail() -> None:
        if failing == "store":
            pool.release()
        whole()
        raise OSError("no")

    monkeypatch.setattr(holder, name, fail)
    if failing != "store":
        close_store = feature._close_store
        monkeypatch.setattr(feature, "_close_store", lambda: (pool.release(), close_store()))
    with pytest.raises(OSError, match="no"):
        feature.close()
    assert engine.prefetcher.closed and store.closed and not arena.mapped
    monkeypatch.undo()


@ways
@pytest.mark.parametrize("used", [False, True], ids=["dropped", "used"])
def test_the_arena_is_unmapped_when_a_graph_that_outlives_close_dies(
    closed_runtime: MakeRuntime, way: Variant, used: bool
) -> None:
    """Reads ahead have ended: nobody asks for what they brought, or backward does after the end."""
    runtime = closed_runtime(way, threads=1)
    layers, loss = loads_held(runtime)
    arena = runtime.engine.buffers._arena
    pool_of(runtime).release()
    runtime.close()
    assert arena.mapped, "backward may need what lies there"
    if used:
        loss.backward()
        assert all(parameter.grad is not None for parameter in layers.parameters())
    del loss
    assert not arena.mapped
    assert runtime.engine.snapshot().buffer_bytes == 0


@pytest.mark.parametrize("holding", ["drain", "snapshot", "reset_peak"])
def test_the_arena_is_unmapped_when_a_graph_dies_while_a_call_after_close_holds_the_lock(
    closed_runtime: MakeRuntime, holding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. the call has looked for deaths; 2. the graph dies, which waits for no lock; 3. the call lets go of the lock."""
    runtime = closed_runtime(threads=1)
    graphs = [loads_held(runtime)[1]]
    engine = runtime.engine
    arena = engine.buffers._arena
    pool_of(runtime).release()
    runtime.close()
    note_ends = engine._note_ends

    def die() -> None:
        note_ends()
        graphs.clear()

    monkeypatch.setattr(engine, "_note_ends", die)
    getattr(engine, holding)()
    assert not graphs and not arena.mapped


@pytest.mark.parametrize("used", [False, True], ids=["dropped", "used"])
def test_the_arena_is_unmapped_when_bytes_that_only_it_has_are_not_needed_any_more(
    closed_runtime: MakeRuntime, used: bool
) -> None:
    """1. tensors are released when their copies are in the arena; 2. their writes have not begun when the store ends."""

    def sines(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 * DEPTH):
            x = x.sin()
        return x.sum()

    runtime = closed_runtime(WAYS[2], deadline="0s", in_flight="64MiB")
    engine = runtime.engine
    pool_of(runtime).hold()
    x = torch.randn(64, 64, requires_grad=True)
    with runtime.forward() as tape:
        loss = sines(x * 2)
    arena = engine.buffers._arena
    runtime.close()
    assert arena.mapped
    assert tape.regions[0].transfer.state is State.STAGED
    if used:
        (expected,) = torch.autograd.grad(sines(x * 2), x)
        loss.backward()
        assert torch.equal(x.grad, expected)
    del loss
    assert not arena.mapped


def test_close_says_what_it_waits_for(
    closed_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = closed_runtime()
    monkeypatch.setattr(engine_module, "PATIENCE", 0.02)
    _, loss = loads_held(runtime)
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        closing = threading.Thread(target=runtime.close)
        closing.start()
        assert eventually(lambda: "bytes to come back" in caplog.text)
        pool_of(runtime).release()
        closing.join()
    loss.backward()


class Owner:
    """Of a runtime, whose finalizer closes it, in a cycle that only the collector ends."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.me = self

    def __del__(self) -> None:
        OUTCOMES.append(holds_signal_safe_lock())
        try:
            self.runtime.close()
        except RuntimeError as error:  # an exception of a finalizer is lost
            OUTCOMES.append(error)


OUTCOMES: list[object] = []


def collecting(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        return method(*args, **kwargs)

    return call


PLACES: dict[str, tuple[type, str]] = {
    "the engine's section": (OffloadEngine, "_drain"),
    "the store's section": (SpillStore, "_drain"),
}


@ways
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
def test_a_finalizer_may_close_inside_of(
    closed_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, way: Variant, place: str, native: bool
) -> None:
    """The collector may run at any allocation: here it does inside of a section of the runtime that it closes."""
    if not native:
        monkeypatch.setattr(signal_safe_lock, "_native", None)
    OUTCOMES.clear()
    runtime = closed_runtime(way)
    x = torch.randn(64, 64, requires_grad=True)
    with stored_forward(runtime):
        (x * 2).sin().sum()
    engine, store = runtime.engine, runtime.offload.store
    Owner(runtime)
    owner, name = PLACES[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, collecting(getattr(owner, name)))
        if owner is OffloadEngine:
            engine.drain()
        else:
            _ = store.metrics
    assert OUTCOMES == [True], "the finalizer was to run inside of a section, and to raise nothing"
    runtime.close()
    assert engine.prefetcher.closed and store.closed
    assert not any(thread.name == "ssdtrain-close" for thread in threading.enumerate())


@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
def test_each_thread_knows_whether_it_is_inside(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr(signal_safe_lock, "_native", None)
    one, other = signal_safe_lock.make_signal_safe_lock(), signal_safe_lock.make_signal_safe_lock()
    assert not holds_signal_safe_lock()
    found: list[bool] = []
    with one:
        with other:
            assert holds_signal_safe_lock()
        assert holds_signal_safe_lock()
        thread = threading.Thread(
            target=lambda: found.append(holds_signal_safe_lock() or one.acquire(blocking=False))
        )
        thread.start()
        thread.join()
    assert found == [False] and not holds_signal_safe_lock()
