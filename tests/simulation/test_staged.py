"""Device memory through staging buffers, on the simulated device: overlap, no waiting host, a peak that timing does not move."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from benchmarks.simulated_device import GB, LOADS, Load, fused, gpt, measure, uniform
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.staged import StagedTransfer
from tests.simulation.conftest import random_layers
from tests.support.simulated.device import SimulatedDevice
from tests.support.simulated.training import (
    LayerTimes,
    Machine,
    _Layer,
    _Program,
    _TimedHooks,
    keep_peak,
    train,
)

MiB = 1 << 20

# Of every shape in the benchmark, small enough for the everyday run.
SUFFICIENT = {
    "uniform": Load(uniform(24, MiB // 4, 0.002), 25 * GB, 12.8 * GB, 4 * MiB, MiB),
    "uniform, most of PCIe": Load(uniform(24, MiB // 4, MiB / 4 / (20 * GB)), 25 * GB, 50 * GB, 4 * MiB, MiB),
    "gpt": Load(gpt(24, MiB, MiB / (12 * GB)), 25 * GB, 20 * GB, 8 * MiB, 2 * MiB),
    "fused": Load(fused(24, MiB, MiB / (12 * GB)), 50 * GB, 20 * GB),
    "1F1B": Load(gpt(6, MiB, MiB / (8 * GB)), 25 * GB, 15 * GB, 16 * MiB, 4 * MiB, microbatches=4, alive=3),
    "host tier": Load(
        gpt(24, MiB, MiB / (10 * GB)), 25 * GB, 15 * GB, 16 * MiB, 4 * MiB, host_bytes=16 * MiB
    ),
}


@pytest.mark.parametrize("name", SUFFICIENT)
def test_where_bandwidth_suffices_nothing_is_seen_of_offloading_but_memory(name: str) -> None:
    found = measure(SUFFICIENT[name])
    assert found["sufficient"] and found["bits_equal"]
    assert found["offloaded_share"] > 0.6
    assert found["forward_over_ideal"] <= 1.03 and found["backward_over_ideal"] <= 1.03
    assert found["d2h_overlap"] >= 0.95 and found["h2d_overlap"] >= 0.95
    assert found["host_syncs"] == 0 and found["outside_bytes"] == 0
    assert found["peak_over_keep"] <= 0.30


def test_where_the_drive_is_the_limit_the_step_takes_what_it_allows() -> None:
    found = measure(Load(uniform(24, MiB // 4, 0.001), 25 * GB, 6.4 * GB, 4 * MiB, MiB))
    assert not found["sufficient"] and found["bits_equal"]
    assert found["total_over_bound"] <= 1.05
    assert found["host_syncs"] == 0


def step(
    layers: tuple[LayerTimes, ...], drive: float, buffer: int, steps: int = 2, **machine: Any
) -> tuple[Any, Any, Machine]:
    """The last of some steps, and its counters."""
    with Machine(400e6, [(drive, drive)], **machine) as made:
        options = EngineOptions(
            min_bytes=1024, in_flight=buffer // 2, buffer=buffer, prefetch=buffer // 2, staged=True
        )
        engine = made.engine(options)
        for seed in range(steps):
            before = engine.snapshot()
            engine.reset_peak()
            record = train(made, engine, layers, seed=seed)
            assert not record.wrong
        after = engine.snapshot()
    return record, (before, after), made


def test_the_peak_does_not_depend_on_how_long_copies_take() -> None:
    layers = (LayerTimes(0.002, 0.004, (MiB // 4,)),) * 16
    peaks = set()
    for seed in range(4):
        generator = random.Random(seed)
        _, (_, after), _ = step(
            layers,
            200e6,
            8 * MiB,
            jitter=lambda seconds, generator=generator: seconds * generator.uniform(0.5, 3),
        )
        peaks.add(after.activation_peak_bytes)
    assert len(peaks) == 1


def test_an_arena_of_a_few_buffers_makes_the_host_wait_and_nothing_else() -> None:
    layers = (LayerTimes(0.002, 0.004, (MiB // 4, MiB // 8)),) * 16
    record, (before, after), machine = step(layers, 200e6, MiB)
    assert after.loaded_bytes > before.loaded_bytes
    assert after.outside_bytes == 0
    assert record.host_syncs == 0
    assert machine.device.blocked_seconds > 0


def test_bytes_that_are_still_being_written_come_back_from_the_staging_buffer() -> None:
    """The drive is so slow that backward begins long before the writes end: nothing is read from it, and nobody waits."""
    layers = (LayerTimes(0.002, 0.004, (MiB // 4,)),) * 12
    record, (_, after), _ = step(layers, 4e6, 16 * MiB, steps=1)
    assert after.forwarded_bytes + after.avoided_write_bytes == keep_peak(layers)
    assert after.loaded_bytes == 0
    assert record.host_syncs == 0
    assert record.ended - record.began <= 12 * 0.006 * 1.03


def test_what_backward_is_about_to_need_stays_on_the_device() -> None:
    """The last tensors of a forward are still there when its backward begins, and are handed over as they are."""
    layers = (LayerTimes(0.002, 0.004, (MiB // 4,)),) * 2
    record, (_, after), _ = step(layers, 4e6, 16 * MiB, steps=1)
    assert not record.to_device
    assert after.forwarded_bytes + after.avoided_write_bytes == keep_peak(layers)


def test_memory_that_a_kernel_still_reads_is_not_loaded_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the events of those who used the memory before, the simulated device sees wrong bytes: so the wait is needed."""
    monkeypatch.setattr(SimulatedDevice, "record", lambda self, stream: None)
    load = SUFFICIENT["uniform"]
    assert not measure(dataclasses.replace(load, layers=load.layers[:16]))["bits_equal"]


@pytest.mark.parametrize("seed", range(6))
def test_random_models_on_random_machines_read_back_what_they_saved(seed: int) -> None:
    generator = random.Random(seed)
    step(
        random_layers(generator),
        generator.choice((20e6, 100e6, 400e6)),
        generator.choice((MiB, 2 * MiB, 8 * MiB)),
        steps=3,
        jitter=lambda seconds: seconds * generator.uniform(0.1, 10),
    )


def test_the_benchmark_has_every_kind_of_load() -> None:
    made = [load(25 * GB) for load in LOADS.values()]
    assert any(load.sufficient for load in made) and any(not load.sufficient for load in made)
    assert any(load.alive > 1 for load in made) and any(load.host_bytes for load in made)


def test_close_waits_for_copies_that_use_the_arena_and_unmaps_it() -> None:
    made = Machine(400e6, [(200e6, 200e6)])
    engine = made.engine(EngineOptions(min_bytes=1024, buffer=4 * MiB, prefetch=2 * MiB, staged=True))
    transfer, arena = engine.mover.transfer, engine.buffers._arena
    assert isinstance(transfer, StagedTransfer) and arena is not None
    # 1. A region was handed out and released while its copy to the device is under way: the copy alone uses the buffer.
    lease = engine.buffers.acquire(MiB)
    target = made.device.load_target(MiB)
    event = made.device.copy_to_device(lease.address, target.data_ptr(), MiB)
    transfer._return(lease, event, None, None)  # type: ignore[arg-type]
    assert not event.done and arena.allocated
    # 2. The engine closes: nobody looks at the buffer any more after that.
    engine.close()
    assert event.done and not arena.allocated and not engine.buffers._outgrown
    made.close()


@pytest.mark.parametrize("used", [False, True], ids=["dropped", "used"])
def test_the_arena_goes_with_a_graph_that_outlives_close(used: bool) -> None:
    made = Machine(400e6, [(200e6, 200e6)])
    engine = made.engine(EngineOptions(min_bytes=1024, buffer=8 * MiB, prefetch=4 * MiB, staged=True))
    arena = engine.buffers._arena
    assert arena is not None
    # 1. All is stored, and read ahead of a backward that has not begun.
    program, tape = _Program(made, engine, (LayerTimes(0.002, 0.004, (MiB // 4,)),) * 8, seed=0), Tape(0, 0)
    loss = torch.zeros(1, requires_grad=True)
    with _TimedHooks(engine, tape, made.timeline):
        for index in range(8):
            loss = _Layer.apply(loss, program, index)
    made.timeline.wait_for(lambda: not engine.snapshot().in_flight_bytes)
    engine.prefetch(tape)
    # 2. The engine closes: what was read lies in the arena, and may still be asked for.
    engine.close()
    assert arena.allocated and arena.mapped
    # 3. Backward runs after all, whose last copies nobody looks at later; or never.
    if used:
        loss.sum().backward()
        made.device.synchronize()
        assert not program.wrong and not made.device.violations
    del loss
    assert not arena.mapped
    made.close()
