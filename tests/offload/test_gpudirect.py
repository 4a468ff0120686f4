"""The engine with GPUDirect Storage, on host memory in the place of a device's: gradients, memory, failures, the choice made."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdtrain.config import ConfigError, load_config
from ssdtrain.offload import engine as engine_module
from ssdtrain.offload.transfer import gpudirect
from ssdtrain.offload.transfer import loads as hanging
from ssdtrain.offload.transfer.state import State
from ssdtrain.runtime import Runtime, Seams
from ssdtrain.storage import Faults, IOFailure
from ssdtrain.storage import gpudirect as storage
from tests.offload.conftest import MakeRuntime, Variant, holds_nothing, settled
from tests.offload.test_programs import FAULTS, INSTRUCTIONS, OPTIONS, agree, make
from tests.offload.test_races import chain, expected, pool_of, until
from tests.support.kvikio_stand_in import KvikioStandIn, install

ON = Variant("gpudirect", {"buffer": "64MiB", "gpudirect": "on", "verify": "off"}, staged=True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KvikioStandIn:
    monkeypatch.setattr(gpudirect, "PROBE", 64 << 10)
    return install(monkeypatch, tmp_path)


def grown(stand_in: KvikioStandIn) -> Callable[[], tuple[int, int]]:
    """A function that returns the bytes (written, read) since."""
    written, read = stand_in.written, stand_in.read
    return lambda: (stand_in.written - written, stand_in.read - read)


def test_gradients_are_those_without_it_and_no_byte_is_in_host_memory(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime
) -> None:
    runtime = make_runtime(ON, prefetch="512KiB")
    moved = grown(stand_in)
    x, loss = chain(runtime)
    settled(runtime)
    found = runtime.statistics().offload
    assert moved() == (found.offloaded_bytes, 0) and found.offloaded_bytes == found.saved_bytes > 0
    loss.backward()
    assert torch.equal(x.grad, expected())
    assert moved() == (found.offloaded_bytes, found.offloaded_bytes)
    assert runtime.engine.buffers.peak == 0
    assert runtime.statistics().store.ssd_bytes_written >= found.offloaded_bytes


@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_encoded_tensors_go_the_same_way(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime, codec: str
) -> None:
    """With the bits that they have through host memory."""
    gradients = []
    for gpudirect_or_not in ("on", "off"):
        runtime = make_runtime(ON, codec=codec, gpudirect=gpudirect_or_not, prefetch="512KiB")
        moved = grown(stand_in)
        x, loss = chain(runtime)
        settled(runtime)
        loss.backward()
        assert (moved() != (0, 0)) == (gpudirect_or_not == "on")
        gradients.append(x.grad)
        del loss
    assert torch.equal(*gradients)


def test_a_tensor_stays_until_its_write_has_ended(stand_in: KvikioStandIn, make_runtime: MakeRuntime) -> None:
    """The write reads its memory."""
    runtime = make_runtime(ON)
    pool_of(runtime).hold(begun=True)
    x, loss = chain(runtime)
    stores = list(runtime.engine.mover.stores)
    assert stores and all(region.in_tensor for region in stores)
    del x, loss
    gc.collect()
    until(lambda: stores[0].transfer.operation.begun(), "a store")
    begun = [region for region in stores if region.transfer.operation.begun()]
    runtime.engine.drain()
    assert all(region.transfer.state is State.RELEASED and region.in_tensor for region in begun)
    pool_of(runtime).release()
    holds_nothing(runtime)
    assert not any(region.in_tensor for region in begun)


def test_memory_that_is_being_filled_is_not_reserved_again(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime
) -> None:
    """Else its users would not be known when it is reused."""
    runtime = make_runtime(ON, prefetch=0)
    engine = runtime.engine
    x, loss = chain(runtime)
    settled(runtime)
    region = runtime.offload.tape(0, -1).regions[0]
    pool_of(runtime).hold(writes=False)
    with engine._lock:
        assert engine.mover.loads.begin(region, on_demand=False)
        target = region.transfer.target
        engine.mover.loads.reserve_target(region)
        assert target is not None and region.transfer.target is target
    pool_of(runtime).release()
    del region
    loss.backward()
    assert torch.equal(x.grad, expected())


def test_what_is_larger_than_the_arena_is_stored_however_busy_the_drive_is(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime
) -> None:
    stand_in.delay = 0.005
    runtime = make_runtime(ON, buffer="2MiB", in_flight="1MiB")
    x = torch.randn(1 << 20, requires_grad=True)
    with runtime.forward():
        loss = x.sin().sin().sin().sum()
    settled(runtime)
    found = runtime.statistics().offload
    assert found.offloaded_bytes == found.saved_bytes > 0 == found.kept_late_bytes
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(grad, torch.autograd.grad(x.sin().sin().sin().sum(), x)[0])


def once(caplog: pytest.LogCaptureFixture, runtime: Runtime) -> None:
    """An error of cuFile was logged once, and the drives are still used."""
    assert caplog.text.count("GPUDirect Storage is not used any more") == 1
    assert not any(drive.retired for drive in runtime.statistics().store.drives)


@pytest.mark.parametrize("codec", ["off", "lossless"])
def test_after_a_failed_write_stores_go_through_host_memory(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture, codec: str
) -> None:
    runtime = make_runtime(ON, codec=codec)
    stand_in.fails.add("write")
    x, loss = chain(runtime)
    settled(runtime)
    before = runtime.statistics().offload
    assert before.failed_stores > 0 < before.kept_bytes
    loss.backward()
    assert torch.equal(x.grad, expected())
    x, loss = chain(runtime)
    settled(runtime)
    after = runtime.statistics().offload
    assert after.failed_stores == before.failed_stores
    assert after.offloaded_bytes - before.offloaded_bytes == after.saved_bytes - before.saved_bytes > 0
    loss.backward()
    assert torch.equal(x.grad, expected())
    once(caplog, runtime)


@pytest.mark.parametrize("prefetch", [0, "512KiB"])
def test_after_a_failed_read_what_was_written_comes_through_host_memory(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture, prefetch: Any
) -> None:
    runtime = make_runtime(ON, prefetch=prefetch)
    x, loss = chain(runtime)
    settled(runtime)
    stand_in.fails.add("read")
    loss.backward()
    assert torch.equal(x.grad, expected())
    once(caplog, runtime)


def test_a_read_that_fails_both_ways_raises(stand_in: KvikioStandIn, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(ON, faults=Faults(read_failure=1.0))
    x, loss = chain(runtime)
    settled(runtime)
    stand_in.fails.add("read")
    with pytest.raises(IOFailure, match="read of"):
        loss.backward()
    assert x.grad is None
    del x, loss
    torch.ones(1, requires_grad=True).sum().backward()  # torch holds nodes of a graph whose backward raised


def test_memory_that_is_not_there_ahead_of_need_is_no_error(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime(ON, prefetch="512KiB")
    engine: Any = runtime.engine
    x, loss = chain(runtime)
    settled(runtime)
    begin, load_target = engine.mover.transfer.begin_load, engine.device.load_target

    def none_left(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    def begin_load(region: Any, *, on_demand: bool, allow_unpooled: bool = False) -> Any:
        if not on_demand:
            monkeypatch.setattr(engine.device, "load_target", none_left)
        try:
            return begin(region, on_demand=on_demand, allow_unpooled=allow_unpooled)
        finally:
            monkeypatch.setattr(engine.device, "load_target", load_target)

    engine.mover.transfer.begin_load = begin_load
    engine.prefetcher._bring = lambda: True
    loss.backward()
    assert torch.equal(x.grad, expected())


def test_where_memory_is_out_what_was_read_ahead_is_dropped(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime(ON, prefetch=0)
    engine = runtime.engine
    x, loss = chain(runtime)
    settled(runtime)
    regions = list(runtime.offload.tape(0, -1).regions)
    load_target = engine.device.load_target

    def full(nbytes: int) -> torch.Tensor:
        if not engine.metrics.evicted_bytes:
            raise torch.OutOfMemoryError("none left")
        return load_target(nbytes)

    with engine._lock:
        assert engine.mover.loads.begin(regions[-1], on_demand=False)
    until(lambda: regions[-1].transfer.operation.done(), "the read")
    monkeypatch.setattr(engine.device, "load_target", full)
    with engine._lock:
        assert engine.mover.loads.begin(regions[0], on_demand=True)
        assert regions[-1].transfer.state is State.STORED
    loss.backward()
    assert torch.equal(x.grad, expected())


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(program=INSTRUCTIONS, seed=st.integers(0, 5), options=OPTIONS, faults=FAULTS)
@pytest.mark.slow
def test_any_program(
    stand_in: KvikioStandIn,
    tmp_path_factory: pytest.TempPathFactory,
    program: list[Any],
    seed: int,
    options: dict[str, Any],
    faults: Faults,
) -> None:
    """But those that free memory under a write: nothing tells of it, as with any copy that a device makes."""
    program = [instruction for instruction in program if instruction[0] not in ("free", "numpy")]
    stand_in.delay = faults.delay * faults.max_delay
    options = {**options, **ON.options, "capacity": "1GiB"}
    with make(str(tmp_path_factory.mktemp("drive")), ON, options, Faults()) as runtime:
        agree(program, seed, runtime)
        gc.collect()
        holds_nothing(runtime)


# The choice at start


def config(tmp_path: Path, **more: Any) -> Any:
    section = {"directories": str(tmp_path / "drive"), "buffer": "64MiB", "verify": "off", **more}
    return load_config({"offload": section})


def chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture, **more: Any) -> tuple[bool, str]:
    """Whether a runtime with these options uses it, and what it logs."""
    with (
        caplog.at_level(logging.INFO, "ssdtrain"),
        Runtime(config(tmp_path, **more), seams=Seams(staged=True)) as runtime,
    ):
        used = isinstance(runtime.engine.mover.transfer, gpudirect.GpuDirectTransfer)
    return used, "\n".join(line for line in caplog.text.splitlines() if "GPUDirect" in line)


@pytest.mark.parametrize(("direct", "staged", "wins"), [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_by_default_the_faster_one_of_a_probe_is_used(
    stand_in: KvikioStandIn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    direct: float,
    staged: float,
    wins: bool,
) -> None:
    measure, measure_staged = gpudirect._seconds, gpudirect._staged_seconds
    monkeypatch.setattr(gpudirect, "_seconds", lambda *how: (measure(*how), direct)[1])
    monkeypatch.setattr(gpudirect, "_staged_seconds", lambda *how: (measure_staged(*how), staged)[1])
    used, line = chosen(tmp_path, caplog)
    assert used == wins
    assert ("is used for" if wins else "it is slower here") in line
    assert stand_in.open_files == 0, "closed with the runtime, or when it lost"


def failing(error: Exception) -> Callable[..., float]:
    def measure(*how: Any) -> float:
        raise error

    return measure


@pytest.mark.parametrize(
    ("holder", "name", "value", "reason"),
    [
        (KvikioStandIn, "garbles", True, "differ from those it wrote"),
        (KvikioStandIn, "fails", {"write"}, "the probe failed"),
        (KvikioStandIn, "fails", {"read"}, "the probe failed"),
        (gpudirect, "_staged_seconds", failing(OSError("a faulty drive")), "failed: a faulty drive"),
        (gpudirect, "_staged_seconds", failing(torch.OutOfMemoryError("none left")), "failed: none left"),
    ],
    ids=["other bytes", "write", "read", "drive", "memory"],
)
def test_a_probe_that_fails_says_no(
    stand_in: KvikioStandIn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    holder: Any,
    name: str,
    value: Any,
    reason: str,
) -> None:
    monkeypatch.setattr(stand_in if holder is KvikioStandIn else holder, name, value)
    used, line = chosen(tmp_path, caplog)
    assert not used and reason in line and stand_in.open_files == 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"verify": "all"}, 'offload.verify is "all"'),
        ({"capacity": "128KiB", "min_bytes": 1024}, "no room for its probe"),
    ],
    ids=["verified as a whole", "no room"],
)
def test_where_it_cannot_be_had_its_reason_is_said(
    stand_in: KvikioStandIn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, Any],
    reason: str,
) -> None:
    used, line = chosen(tmp_path, caplog, **more)
    assert not used and reason in line and not stand_in.written


def test_a_probe_that_hangs_says_no_and_nothing_waits_for_it(
    stand_in: KvikioStandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpudirect, "TIMEOUT", 0.05)
    hung: list[Any] = []
    monkeypatch.setattr(storage, "_HUNG", hung)
    stand_in.gate.clear()
    used, line = chosen(tmp_path, caplog)
    assert not used and "has not ended" in line
    ((pool, memory),) = hung
    assert all(isinstance(tensor, torch.Tensor) for tensor in memory) and len(memory) == 2
    stand_in.gate.set()
    pool.close_device()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_transfer_that_hangs_in_training_is_not_waited_for_for_ever(
    stand_in: KvikioStandIn, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """1. a transfer hangs; 2. close ends by an error that names it, and what it uses stays; 3. everything else is closed."""
    monkeypatch.setattr(engine_module, "PATIENCE", 0.05)
    monkeypatch.setattr(storage, "CLOSE_TIMEOUT", 0.05)
    pools: list[Any] = []
    regions: list[Any] = []
    monkeypatch.setattr(storage, "_HUNG", pools)
    monkeypatch.setattr(hanging, "_HUNG", regions)
    runtime = make_runtime(ON, deadline="50ms", prefetch="512KiB")
    engine, store = runtime.engine, runtime.offload.store
    if kind == "write":
        stand_in.gate.clear()
    x, loss = chain(runtime)
    if kind == "read":
        settled(runtime)
        stand_in.gate.clear()
        engine.prefetch(runtime.offload.tape(0, -1))
    until(lambda: any(region.transfer.operation.begun() for region in engine.mover.busy()), kind)
    with pytest.raises(TimeoutError, match=r"offload\.gpudirect"):
        runtime.close()
    ((pool, region),) = zip(pools, regions[:1], strict=True)
    assert region.transfer.in_place and not region.transfer.operation.done()
    assert store.closed and not engine.buffers.capacity
    stand_in.gate.set()
    assert pool._device_pool.close_within(60)
    pools.clear()
    pool.close_device()
    runtime.close()
    del x, loss


@pytest.mark.parametrize("more", [{}, {"prefetch": 0}, {"threads": 1}], ids=str)
def test_a_read_that_hangs_in_backward_is_given_up_for_one_through_host_memory(
    stand_in: KvikioStandIn,
    make_runtime: MakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, Any],
) -> None:
    """1. reads hang; 2. backward waits a while; 3. it gets the same bytes the other way; 4. what hangs keeps its memory."""
    monkeypatch.setattr(engine_module, "PATIENCE", 0.05)
    kept: list[Any] = []
    monkeypatch.setattr(hanging, "_HUNG", kept)
    runtime = make_runtime(ON, **more)
    x, loss = chain(runtime)
    settled(runtime)
    stand_in.gate.clear()
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        loss.backward()
    assert torch.equal(x.grad, expected())
    assert "GPUDirect Storage is not used any more" in caplog.text
    assert any(isinstance(memory, torch.Tensor) and memory.nbytes for memory in kept)
    stand_in.gate.set()
    del x, loss


@pytest.mark.parametrize("choice", ["on", "auto"])
def test_the_probe_is_not_counted(stand_in: KvikioStandIn, tmp_path: Path, choice: str) -> None:
    with Runtime(config(tmp_path, gpudirect=choice), seams=Seams(staged=True)) as runtime:
        found = runtime.statistics().store
    assert stand_in.written and (found.ssd_bytes_written, found.write_seconds, found.read_seconds) == (
        0,
        0,
        0,
    )


def test_demanded_and_not_possible_is_an_error_with_the_reason(
    stand_in: KvikioStandIn, tmp_path: Path
) -> None:
    stand_in.is_gds_available = False
    with pytest.raises(ValueError, match=r'offload.gpudirect is "on", but .*nvidia-fs.*set it to "auto"'):
        Runtime(config(tmp_path, gpudirect="on"), seams=Seams(staged=True))


def test_demanded_on_the_cpu_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activations are on the CPU"):
        Runtime(config(tmp_path, gpudirect="on"))


@pytest.mark.parametrize("section", [{"host": "1MiB"}, {"directories": "/a"}])
def test_demanded_where_it_can_move_nothing_is_an_error_of_the_config(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gpudirect"):
        load_config({"offload": {**section, "gpudirect": "on"}})


def test_on_the_cpu_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssdtrain"), Runtime(config(tmp_path)):
        pass
    assert "GPUDirect" not in caplog.text
