"""Bytes under way where nobody has set them: by what operators save."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.simulated_device import GB, Load, measure, uniform
from ssdtrain.config import load_config
from ssdtrain.offload.build import build_engine
from ssdtrain.offload.hooks import SavedTensorRecorder
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.pacing.limits import TransferLimits
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.buffers import Buffers
from ssdtrain.runtime import Runtime
from tests.support.simulated.training import (
    LayerTimes,
    Machine,
    one_after_the_other,
    one_forward_one_backward,
    train,
)
from tests.support.threads import others_may_take

MiB = 1 << 20

LARGE = Load(uniform(8, 4 * MiB, 4 * MiB / (0.8 * 50 * GB)), 50 * GB, 50 * GB, 4 * MiB, buffer_limit=64 * MiB)
"""As in the benchmark, tensors of the size of the whole arena; the link and the drive have a fifth to spare."""


def test_tensors_as_large_as_the_arena_leave_while_forward_runs() -> None:
    """The arena grows until a tensor is copied into it while another is written from it, and another is read."""
    found = measure(LARGE)
    assert found["sufficient"] and found["bits_equal"] and found["offloaded_share"] >= 0.6
    assert found["forward_over_ideal"] <= 1.03 and found["backward_over_ideal"] <= 1.03
    assert found["d2h_overlap"] >= 0.8 and found["h2d_overlap"] >= 0.95
    assert found["host_syncs"] == 0 and found["outside_bytes"] == 0


def test_a_limit_that_is_set_stays() -> None:
    """One tensor at a time, as asked for: forward waits for the drive."""
    found = measure(dataclasses.replace(LARGE, in_flight=4 * MiB))
    assert found["bits_equal"]
    assert found["forward_over_ideal"] > 1.2


def engine_after(layers: tuple[LayerTimes, ...], **options: Any) -> Any:
    with Machine(400e6, [(400e6, 400e6)]) as machine:
        given = {"min_bytes": 1024, "buffer": 4 * MiB, "staged": True}
        engine = machine.engine(EngineOptions(**{**given, **options}))
        for seed in range(2):
            assert not train(machine, engine, layers, seed=seed).wrong
        return engine


LAYERS = (LayerTimes(0.02, 0.04, (MiB, MiB)),) * 6


@pytest.mark.parametrize(
    ("layers", "options", "arena", "in_flight"),
    [
        (LAYERS, {"buffer_limit": 64 * MiB}, 8 * MiB, 4 * MiB),  # four operators of two tensors
        (LAYERS, {}, 4 * MiB, 2 * MiB),  # the size is set
        (LAYERS, {"buffer_limit": 6 * MiB}, 4 * MiB, 2 * MiB),  # another arena of 8 MiB would be too much
        (LAYERS, {"buffer_limit": 64 * MiB, "in_flight": MiB}, 8 * MiB, MiB),
        ((*LAYERS, LayerTimes(0.1, 0.1, (10 * MiB,))), {"buffer_limit": 64 * MiB}, 10 * MiB, 5 * MiB),
    ],
    ids=["grows", "set", "bounded", "set-in-flight", "outlier"],
)
def test_limits_follow_what_operators_save(
    monkeypatch: pytest.MonkeyPatch,
    layers: tuple[LayerTimes, ...],
    options: dict[str, Any],
    arena: int,
    in_flight: int,
) -> None:
    seen: list[int] = []
    close = Buffers.close
    monkeypatch.setattr(Buffers, "close", lambda self: seen.append(self.capacity) or close(self))
    engine = engine_after(layers, **options)
    assert (seen[0], engine.mover.stores.limit) == (arena, in_flight)
    assert engine.metrics.kept_late_bytes == 0, "a tensor found no room"


def test_an_outlier_is_on_the_device_once() -> None:
    """The logits: the tensors before them leave while they are made."""
    engine = engine_after((*LAYERS, LayerTimes(0.1, 0.1, (10 * MiB,))), buffer_limit=64 * MiB)
    assert engine.mover.departures.limit == 4 * MiB
    assert engine_after(LAYERS, buffer_limit=64 * MiB).mover.departures.limit == 4 * MiB
    layers = (LayerTimes(0.02, 0.04, (MiB,)),) * 16
    peaks = [
        engine_after((*layers, LayerTimes(0.1, 0.1, (last * MiB,))), buffer_limit=64 * MiB).snapshot()
        for last in (1, 6)
    ]
    assert peaks[1].activation_peak_bytes - peaks[0].activation_peak_bytes <= 6 * MiB


@pytest.mark.parametrize(
    ("order", "at_forwards"),
    [(one_after_the_other(2), [4, 8]), (one_forward_one_backward(4, 2), [4, 4, 4, 4])],
    ids=["plain", "1F1B"],
)
def test_an_arena_grows_when_nothing_is_alive(order: list[tuple[str, int]], at_forwards: list[int]) -> None:
    """To pin memory may wait for the device, and that for another rank of the pipeline."""
    with Machine(400e6, [(400e6, 400e6)]) as machine:
        engine = machine.engine(
            EngineOptions(min_bytes=1024, buffer=4 * MiB, buffer_limit=64 * MiB, staged=True)
        )
        seen: list[int] = []
        begin = engine.begin_forward

        def grow_and_begin(tape: Tape) -> None:
            engine.grow(between_steps=False)
            seen.append(engine.buffers.capacity // MiB)
            begin(tape)

        engine.begin_forward = grow_and_begin  # type: ignore[method-assign]
        assert not train(machine, engine, LAYERS, order=order).wrong
        assert seen == at_forwards
        assert engine.buffers.capacity == 8 * MiB, "at the end of the step"
        assert engine.mover.stores.limit == 4 * MiB
    engine.grow(between_steps=True)
    assert engine.buffers.capacity == 0, "it is closed"


@pytest.mark.parametrize("steps", [True, False], ids=["steps", "plain"])
def test_in_a_loop_that_announces_its_steps_an_arena_grows_between_them(steps: bool, tmp_path: Path) -> None:
    config = load_config({"offload": {"directories": str(tmp_path), "amount": "all"}})
    grown: list[bool] = []
    with Runtime(config, torch.device("cpu")) as runtime:
        runtime.engine.grow = lambda *, between_steps: grown.append(between_steps)  # type: ignore[method-assign]
        weight = torch.ones(64, 64, requires_grad=True)
        for _ in range(2):
            with runtime.step() if steps else nullcontext():
                for _ in range(2):
                    with runtime.forward():
                        loss = weight.sin().sum()
                    loss.backward()
    assert grown == ([True] * 2 if steps else [False] * 4)


@pytest.mark.parametrize(
    ("copies", "saved", "limit"), [(False, 300, 256), (True, 100, 256), (True, 300, 600)]
)
def test_where_tensors_are_written_from_their_own_memory_the_limit_is_a_part_of_the_peak(
    copies: bool, saved: int, limit: int
) -> None:
    """On the CPU that of before; with GPUDirect Storage what two operators save, so that one is written while the next runs."""
    transfer = SimpleNamespace(copies=copies, unstaged=False, buffers=SimpleNamespace(capacity=1024 * MiB))
    mover = SimpleNamespace(transfer=transfer, departures=SimpleNamespace(limit=0), stores=SimpleNamespace())
    limits = TransferLimits(mover, EngineOptions(by_cufile=copies))  # type: ignore[arg-type]
    assert mover.stores.allowed == 256 * MiB
    limits.saw(Tape(), saved * MiB, saved * MiB)
    assert mover.stores.allowed == limit * MiB


@pytest.mark.parametrize(
    ("section", "grows"),
    [({}, True), ({"buffer": "64MiB"}, False), ({"directories": [], "host": "4MiB"}, True)],
    ids=["drive", "set", "host"],
)
def test_an_arena_grows_where_drives_are_written_through_it_and_its_size_is_not_set(
    section: dict[str, Any], grows: bool, tmp_path: Path
) -> None:
    config = load_config({"offload": {"directories": str(tmp_path), "amount": "all", **section}}).offload
    assert config is not None
    directories = [tmp_path] if config.directories else []
    engine, store = build_engine(config, torch.device("cpu"), directories, staged=True)
    try:
        assert engine.options.buffer_limit is None or engine.options.buffer_limit >= engine.buffers.capacity
        assert (engine.options.buffer_limit is not None) == grows
        room = engine.options.buffer_room
        assert room is not None and room() > 0
        assert engine.mover.stores.limit == engine.buffers.capacity // 2
    finally:
        engine.close()
        store.close()


def grow(buffers: Buffers, wanted: int, limit: int, room: Callable[[], int] | None = None) -> None:
    nbytes = buffers.missing(wanted, limit)
    arena = buffers.pin(nbytes, room) if nbytes else None
    if arena is not None:
        buffers.adopt(arena)


@pytest.mark.parametrize("forward", [False, True], ids=["between-steps", "in-a-forward"])
def test_other_threads_go_on_while_an_arena_is_pinned(
    forward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning takes seconds and may wait for the device: whoever needs the engine's lock does not wait for it."""
    config = load_config({"offload": {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}}).offload
    assert config is not None
    engine, store = build_engine(config, torch.device("cpu"), [tmp_path], staged=True)
    free: list[bool] = []

    def register(address: int, nbytes: int) -> Callable[[], None]:
        free.append(others_may_take(engine._lock))
        return lambda: None

    try:
        engine.buffers.close()
        monkeypatch.setattr(engine.buffers, "_cannot_grow", False)
        monkeypatch.setattr(engine.buffers, "_register", register)
        x = torch.randn(1024, 1024, requires_grad=True)
        with SavedTensorRecorder(engine, Tape()):
            loss = (x * 2).sin().sum()
        if not forward:
            engine.grow(between_steps=True)
        assert free == [True] and engine.buffers.capacity >= 4 * MiB
        assert engine.metrics.kept_late_bytes == 0, "a tensor found no room"
        loss.backward()
        assert x.grad is not None and torch.equal(x.grad, (x * 2).cos() * 2)
    finally:
        engine.close()
        store.close()


def test_other_threads_go_on_while_the_arena_is_unpinned_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """To unpin memory waits for the device."""
    made, free = Machine(400e6, [(1e9, 1e9)]), []

    def unregister() -> None:
        free.append(others_may_take(engine._lock))

    monkeypatch.setattr(made.device, "host_register", lambda: lambda address, nbytes: unregister)
    engine = made.engine(EngineOptions(min_bytes=1024, buffer=4 * MiB, staged=True))
    made.close()
    assert free == [True]


@pytest.mark.parametrize("kind", [OSError, MemoryError, torch.cuda.CudaError])
def test_without_memory_to_pin_the_arena_stays_with_a_warning(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the system does not map it, and where CUDA does not pin it."""
    pinned: list[int] = []

    def register(address: int, nbytes: int) -> Any:
        if pinned:
            raise kind.__new__(kind, "none")  # without CUDA, a CudaError cannot be made from its code
        pinned.append(nbytes)
        return lambda: None

    buffers = Buffers(4 * MiB, register, None)
    with caplog.at_level(logging.WARNING, logger="ssdtrain"):
        for _ in range(2):
            grow(buffers, 8 * MiB, 64 * MiB)
    assert buffers.capacity == 4 * MiB
    (record,) = caplog.records
    assert "offload.buffer" in record.getMessage() and str(8 * MiB) in record.getMessage()
    buffers.close()


@pytest.mark.parametrize(("room", "capacity"), [(64, 16), (10, 10), (4, 4), (0, 4)])
def test_an_arena_grows_by_the_memory_that_is_free_when_it_grows(
    room: int, capacity: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Since the engine was built, optimizer and loaders have taken theirs; to pin more than a cgroup allows ends the process."""
    buffers = Buffers(4 * MiB, lambda address, nbytes: lambda: None, None)
    with caplog.at_level(logging.WARNING, logger="ssdtrain"):
        grow(buffers, 16 * MiB, 128 * MiB, lambda: room * MiB)
    assert buffers.capacity == capacity * MiB
    assert len(caplog.records) == (capacity == 4)
    buffers.close()


def test_the_arena_before_stays_in_use() -> None:
    """To unpin it would wait for the device: its buffers serve beside those of the larger one."""
    unpinned: list[int] = []
    buffers = Buffers(2 * MiB, lambda address, nbytes: lambda: unpinned.append(nbytes), None)
    held = buffers.acquire(MiB)
    grow(buffers, 4 * MiB, 64 * MiB)
    assert buffers.capacity == 4 * MiB and buffers.acquire(4 * MiB) is not None
    again = buffers.acquire(MiB)
    assert held is not None and again is not None and buffers.allocated == 6 * MiB
    assert not unpinned
    buffers.close()
