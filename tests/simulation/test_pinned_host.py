"""The pinned host tier: copies between the device and its slots, with no thread of the host in between."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import NonCallableMock

import pytest

from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.transfer.state import TransferState
from ssdtrain.storage import SpillStore, StoreMetrics
from tests.simulation.conftest import random_layers
from tests.simulation.streams import SIZE, Streams
from tests.support.simulated.training import (
    LayerTimes,
    Machine,
    StepRecord,
    keep_peak,
    one_after_the_other,
    train,
)

MiB = 1 << 20


def steps(
    layers: tuple[LayerTimes, ...],
    host_bytes: int,
    count: int = 3,
    drive: float = 50e6,
    microbatches: int = 1,
    **machine: Any,
) -> tuple[list[StepRecord], OffloadMetrics, StoreMetrics, Machine]:
    with Machine(400e6, [(drive, drive)], **machine) as made:
        options = EngineOptions(
            min_bytes=1024, in_flight=2 * MiB, buffer=4 * MiB, prefetch=2 * MiB, staged=True
        )
        engine = made.engine(options, host_bytes=host_bytes)
        order = one_after_the_other(microbatches)
        records = [train(made, engine, layers, order=order, seed=seed) for seed in range(count)]
        return records, engine.snapshot(), made.store.metrics, made


def test_copies_go_to_its_slots_and_nothing_waits_for_the_host() -> None:
    """The copies of the host are so slow here that a step would take seconds through them."""
    layers = (LayerTimes(0.002, 0.004, (MiB // 4,)),) * 24
    records, found, store, made = steps(layers, 16 * MiB, host_bandwidth=1e6)
    assert not any(record.wrong for record in records)
    assert records[-1].ended - records[-1].began <= 24 * 0.006 * 1.03
    assert records[-1].host_syncs == 0 and found.outside_bytes == 0
    assert found.loaded_bytes > 0.5 * 3 * keep_peak(layers)
    assert store.host_bytes_written == found.offloaded_bytes and store.host_bytes_read >= found.loaded_bytes
    assert store.ssd_bytes_written == 0 and made.pool.counters()[0] == [(0, 0, 0.0, 0.0)]


def test_what_it_has_no_room_for_goes_to_the_drive() -> None:
    layers = (LayerTimes(0.004, 0.008, (MiB // 4,)),) * 24
    records, found, store, _ = steps(layers, 2 * MiB, drive=200e6)
    assert not any(record.wrong for record in records)
    assert store.host_bytes_written and store.ssd_bytes_written and store.ssd_bytes_read
    assert found.outside_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_models_read_back_what_they_saved(seed: int) -> None:
    generator = random.Random(seed)
    records, _, store, _ = steps(
        random_layers(generator),
        generator.choice((MiB, 4 * MiB)),
        microbatches=3,
        jitter=lambda seconds: seconds * generator.uniform(0.1, 10),
    )
    assert not any(record.wrong for record in records)
    assert store.host_bytes_written


@pytest.mark.parametrize("known", [True, False], ids=["", "without the event of its last copy"])
def test_a_slot_is_not_reused_while_a_copy_uses_it(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second stream gets a tensor whose copy back is late; the first one, which waits for nothing, saves the next."""
    if not known:
        free = SpillStore.free
        monkeypatch.setattr(SpillStore, "free", lambda store, slot, copied=None: free(store, slot))
    streams = Streams(host_bytes=SIZE)
    held = [streams.save(streams.make(1))]
    streams.engine.finish_forward(streams.tape)
    streams.device.synchronize()
    streams.engine.drain()
    streams.device.load.work(0.01)
    with streams.device.stream(streams.side):
        streams.read(streams.engine.unpack(held.pop()), 1, 1e-3, "the next tensor")
    streams.engine.drain()
    held.append(streams.save(streams.make(2)))
    streams.engine.finish_forward(streams.tape)
    streams.device.synchronize()
    assert (not streams.wrong) is known
    held.clear()
    streams.machine.close()


def test_a_buffer_is_not_waited_for_where_none_comes_back() -> None:
    """1. a tensor is on its way to the host tier; 2. the arena is exhausted; 3. backward needs what is on a drive."""
    made = Machine(400e6, [(1e9, 1e9)])
    engine = made.engine(EngineOptions(min_bytes=1024, buffer=4 * MiB, staged=True), host_bytes=MiB)
    transfer: Any = engine.mover.transfer
    tensor = made.device.empty(MiB)
    host_slot, drive_slot = made.store.reserve(MiB), made.store.reserve(MiB, "ssd")
    assert made.store.write(drive_slot, tensor.data_ptr()).wait(60)
    region = NonCallableMock(nbytes=MiB, transfer=TransferState())
    region.transfer.slot, region.transfer.stored_bytes = drive_slot, MiB
    copy = transfer.copy_out(tensor.data_ptr(), host_slot)
    assert transfer.passing() is copy and not copy.query()
    engine.buffers.acquire = lambda nbytes, lead=0: None  # type: ignore[method-assign]
    assert engine.mover.loads.begin(region, on_demand=True), "it waits for a copy that brings no buffer"
    assert engine.snapshot().outside_bytes == MiB
    assert region.transfer.operation.wait(60)
    made.close()
