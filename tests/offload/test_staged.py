"""What the way of device memory does with tensors and buffers, and what follows a close, on the CPU's streams that do nothing."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ssdtrain.codecs.base import FLOATS
from ssdtrain.config import load_config
from ssdtrain.offload import build
from ssdtrain.offload.pacing.limits import Departures
from ssdtrain.offload.transfer.state import State
from ssdtrain.runtime import Runtime
from ssdtrain.storage import Faults
from tests.offload.conftest import VARIANTS, MakeRuntime, holds_nothing, settled
from tests.offload.test_races import chain, expected, pool_of, until
from tests.support.lagging import LaggingDevice
from tests.support.threads import others_may_take

STAGED = VARIANTS[2]


def test_what_comes_back_has_the_geometry_of_what_was_saved(make_runtime: MakeRuntime) -> None:
    """Also where other tensors were saved over the same bytes, and where it is asked for again."""
    runtime = make_runtime(STAGED)
    engine = runtime.engine
    base = torch.arange(8192.0)
    saved = [
        base.view(1, 64, 128).transpose(1, 2),
        torch.ones(4096, 1, dtype=torch.bool),
        torch.randn(64, 1, 64, dtype=torch.bfloat16),
        torch.randn(128, 64)[:, :48],
        torch.arange(1024, dtype=torch.int64).view(torch.uint8),
    ]
    saved.append(saved[2].view(-1))
    expected = [tensor.clone() for tensor in saved]
    geometry = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in saved]
    with runtime.forward() as tape:
        handles = []
        for tensor in saved:
            torch.ones(1, requires_grad=True).neg()  # the next operator
            handles.append(engine.pack(tape, tensor))
    del saved, tensor, base
    settled(runtime)
    for _ in range(2):
        for handle, values, form in zip(handles[::-1], expected[::-1], geometry[::-1], strict=True):
            tensor = engine.unpack(handle)
            assert torch.equal(tensor, values) and tensor._base is None
            assert (tensor.dtype, tensor.shape, tensor.stride()) == form
            tensor.zero_()  # as a backward may: the next pass gets what was saved
    assert engine.metrics.loaded_bytes > 0
    del handles, handle, tensor
    holds_nothing(runtime)


def test_what_is_on_the_device_already_is_not_dropped_for_a_buffer(make_runtime: MakeRuntime) -> None:
    """Its staging buffer is back: dropping it would give none, and it would be read again."""
    runtime = make_runtime(STAGED, prefetch=0)
    engine = runtime.engine
    x, loss = chain(runtime)
    settled(runtime)
    first, *_, last = [
        region for region in runtime.offload.tape(0, -1).regions if region.transfer.state is State.STORED
    ]
    mover: Any = engine.mover
    with engine._lock:
        assert mover.loads.begin(last, on_demand=False)
    last.transfer.operation.wait(60)
    with engine._lock, mover.transfer.targets.waiting():
        mover.loads.end(last)
        engine.buffers.acquire = lambda nbytes, lead=0: None
        assert mover.loads.begin(first, on_demand=True)
    del engine.buffers.acquire
    assert last.transfer.state is State.LOADED and mover.metrics.evicted_bytes == 0
    assert mover.metrics.outside_bytes == first.nbytes
    del first, last, _
    loss.backward()
    assert torch.equal(x.grad, expected())


def test_a_buffer_outside_of_the_arena_is_host_memory_whatever_the_default_device_is(
    make_runtime: MakeRuntime,
) -> None:
    """The drive is read into it: with `torch.set_default_device("cuda")` it would be memory that no system call fills."""
    runtime = make_runtime(STAGED, prefetch=0)
    engine = runtime.engine
    x, loss = chain(runtime)
    settled(runtime)
    stored = [
        region for region in runtime.offload.tape(0, -1).regions if region.transfer.state is State.STORED
    ]
    with engine._lock, torch.device("meta"), patch.object(engine.buffers, "acquire", lambda nbytes: None):
        assert engine.mover.loads.begin(stored[-1], on_demand=True)
    loaded = stored[-1].transfer.loaded
    assert loaded.device.type == "cpu" and engine.mover.metrics.outside_bytes
    del stored, loaded
    loss.backward()
    assert torch.equal(x.grad, expected())


def test_the_kernels_of_a_codec_are_compiled_when_the_engine_is_made(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in the first step, under the engine's lock."""
    warmed: list[Any] = []
    monkeypatch.setattr(
        build, "warm_up", lambda codec, device, dtypes: warmed.append((device, tuple(dtypes)))
    )
    make_runtime(STAGED, codec="int8")
    device = torch.device("cpu")
    assert warmed == [(device, FLOATS), (device, (torch.bool,))]


def test_a_released_head_delays_no_departure() -> None:
    """1. backward drops the oldest tensor while it is stored; 2. the next three are stored; 3. the oldest of these leaves."""
    left: list[Any] = []
    departures = Departures(left.append, left.append, left.append)
    departures.limit = 100
    regions = [
        SimpleNamespace(
            nbytes=100,
            on_device=True,
            freed=lambda: False,
            transfer=SimpleNamespace(state=State.STORING, keep_resident=False, rest=None),
        )
        for _ in range(4)
    ]
    departures.add(regions[0])
    regions[0].transfer.state = State.RELEASED
    for region in regions[1:]:
        departures.add(region)
    assert left == [regions[1]]


def test_a_part_departs_when_the_tape_has_moved_on_also_where_nothing_else_is_stored() -> None:
    left: list[Any] = []
    departures = Departures(left.append, left.append, left.append)
    departures.limit = 200
    transfer = SimpleNamespace(state=State.STORING, keep_resident=False, rest=object(), saved_before=0)
    region: Any = SimpleNamespace(nbytes=100, on_device=True, freed=lambda: False, transfer=transfer)
    departures.add_part(region, 100)
    departures.advance(200)  # the next operator, whose kernel runs before the copy off the device begins
    assert not left
    departures.advance(300)
    assert left == [region] and not departures.parting


def test_no_device_memory_ahead_of_need_is_no_error(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime(STAGED)
    engine = runtime.engine
    x, loss = chain(runtime)
    settled(runtime)
    prefetch, load_target = engine._prefetch_into_new_memory, engine.device.load_target
    refused: list[int] = []

    def none_left(nbytes: int) -> torch.Tensor:
        refused.append(nbytes)
        raise torch.OutOfMemoryError("none left")

    def prefetch_without_memory(*arguments: Any) -> None:
        monkeypatch.setattr(engine.device, "load_target", none_left)
        try:
            prefetch(*arguments)
        finally:
            monkeypatch.setattr(engine.device, "load_target", load_target)

    monkeypatch.setattr(engine, "_prefetch_into_new_memory", prefetch_without_memory)
    loss.backward()
    assert refused, "nothing was tried ahead of need"
    assert torch.equal(x.grad, expected())


def test_other_threads_go_on_while_memory_for_a_load_is_allocated(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator may have to wait for the device, ahead of the use of a tensor and where backward asks for it."""
    runtime = make_runtime(STAGED, prefetch=0)
    engine = runtime.engine
    free: list[bool] = []
    load_target = engine.device.load_target

    def allocate(nbytes: int) -> torch.Tensor:
        free.append(others_may_take(engine._lock))
        return load_target(nbytes)

    monkeypatch.setattr(engine.device, "load_target", allocate)
    for ahead in (0, 1 << 20):
        x, loss = chain(runtime)
        settled(runtime)
        engine.prefetcher.limit, before = ahead, len(free)
        loss.backward()
        assert torch.equal(x.grad, expected())
        assert len(free) > before and all(free)


def test_a_store_that_fails_after_close_leaves_its_bytes_where_they_are(make_runtime: MakeRuntime) -> None:
    """1. stores are under way; 2. the engine closes; 3. they fail; 4. the store closes; 5. backward."""
    runtime = make_runtime(VARIANTS[0], deadline=0, faults=Faults(write_failure=1.0))
    engine = runtime.engine
    pool_of(runtime).hold(begun=True)
    x, loss = chain(runtime)
    operations = [region.transfer.operation for region in engine.mover.busy()]
    until(lambda: any(operation.begun() for operation in operations), "a store")
    engine.close()
    pool_of(runtime).release()
    while not all(operation.done() for operation in operations):
        time.sleep(0.001)
    runtime.offload.store.close()
    loss.backward()
    assert torch.equal(x.grad, expected())


def test_a_pinned_host_tier_is_not_looked_at_after_close(tmp_path: Path) -> None:
    """1. loads of it are under way; 2. the runtime closes, and with it the tier is unmapped; 3. backward."""
    device = LaggingDevice(seed=0)
    with patch("ssdtrain.offload.build.device_for", lambda _: device):
        section = {"host": "4MiB", "min_bytes": 1024, "buffer": "4MiB", "in_flight": "1MiB"}
        runtime = Runtime(load_config({"offload": section}))
    engine = runtime.engine
    x, loss = chain(runtime)
    settled(runtime)
    engine.prefetch(runtime.offload.tape(0, -1))
    states = {region.transfer.state for region in runtime.offload.tape(0, -1).regions if region is not None}
    assert State.LOADING in states or State.STORED in states
    runtime.close()
    with pytest.raises(RuntimeError, match="after the offload engine was closed"):
        loss.backward()
    device.close()
    del x, loss
    torch.ones(1, requires_grad=True).sum().backward()  # torch holds nodes of a graph whose backward raised
