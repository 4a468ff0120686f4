"""Copies of the device: who holds their memory, what a lack of memory leaves, and what an end waits for."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from ssdtrain.offload import engine as engine_module
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.transfer.state import State
from tests.simulation.streams import SIZE, MiB, Streams
from tests.support.simulated.device import SimulatedEvent
from tests.support.simulated.drive import SimulatedOperation
from tests.support.simulated.training import LayerTimes, Machine, keep_peak, train


def test_a_cancelled_store_does_not_give_its_tensor_to_others_under_the_copy(streams: Streams) -> None:
    """1. a copy begins; 2. the graph is dropped, and with it the store; 3. the next tensor takes the first free memory."""
    held = [streams.save(streams.make(5))]
    streams.engine.finish_forward(streams.tape)
    streams.machine.timeline.spend(1e-4 + SIZE / 400e6 / 2)
    assert not streams.device.store.idle
    held.clear()
    gc.collect()
    streams.engine.drain()
    assert streams.engine.metrics.avoided_write_bytes == SIZE
    streams.make(6)
    streams.check()


def test_a_store_that_must_be_written_does_not_give_its_tensor_to_others_before_its_copy(
    streams: Streams,
) -> None:
    """1. its copy waits for a kernel; 2. the graph is dropped; 3. the next tensor takes the first free memory."""
    held = [streams.save(streams.make(5))]
    held[0].region.transfer.must_write = True
    streams.kernel(1.0)
    streams.engine.finish_forward(streams.tape)
    held.clear()
    gc.collect()
    streams.engine.drain()
    streams.make(6)
    streams.device.synchronize()
    streams.machine.timeline.spend(1.0)
    streams.engine.drain()
    found = streams.engine.metrics
    assert found.avoided_write_bytes == 0 and found.offloaded_bytes == SIZE
    assert streams.machine.store.metrics.bytes_written == SIZE
    assert streams.machine.store.metrics.live_slots == 0
    streams.check()


def test_a_cancelled_store_holds_its_payload_until_the_copy_has_ended(streams: Streams) -> None:
    streams.kernel(1.0)  # the copy comes after it
    held: list[Any] = [streams.save(streams.device.empty(SIZE).fill_(1).view(torch.bool))]
    streams.engine.finish_forward(streams.tape)
    payload = weakref.ref(held[0].region.transfer.payload)
    assert isinstance(payload(), torch.Tensor)
    held.clear()
    gc.collect()
    streams.engine.drain()
    assert streams.engine.metrics.avoided_write_bytes == SIZE
    assert payload() is not None, "the copy reads memory that is free"
    streams.device.synchronize()
    streams.engine.drain()
    assert payload() is None


def test_a_copy_that_finds_no_memory_can_be_tried_again(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a tensor has been read; 2. there is no device memory for it; 3. there is some again."""
    held = [streams.save(streams.make(number + 1)) for number in range(8)]
    streams.engine.finish_forward(streams.tape)
    streams.device.synchronize()
    streams.machine.timeline.spend(1.0)
    streams.engine.drain()
    region = held[0].region
    assert region.transfer.state is State.STORED

    def none_left(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(streams.device, "load_target", none_left)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                streams.engine.unpack(held[0])
    streams.read(streams.engine.unpack(held[0]), 1, 1e-3, "backward")
    streams.check()


def test_looking_for_ended_stores_costs_the_same_however_many_are_under_way(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def counting(plain: Any) -> Any:
        def counted(self: Any) -> bool:
            asked.append(self)
            return bool(plain(self))

        return counted

    monkeypatch.setattr(SimulatedOperation, "done", counting(SimulatedOperation.done))
    monkeypatch.setattr(SimulatedEvent, "query", counting(SimulatedEvent.query))
    streams.kernel(10.0)
    counts = []
    held = []
    for _ in range(2):
        held += [streams.save(streams.make(3)) for _ in range(12)]
        asked.clear()
        streams.engine.mover.reap()
        counts.append(len(asked))
    assert len(streams.engine.mover.stores) >= 20 and counts[0] == counts[1] <= 2


def test_close_does_not_wait_for_ever_for_a_copy_behind_a_collective_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. a peer is gone, and the compute stream waits for it; 2. a copy is queued behind; 3. close gives up, unmaps nothing."""
    monkeypatch.setattr(engine_module, "PATIENCE", 0.5)
    streams = Streams()
    engine, arena = streams.engine, streams.engine.buffers._arena
    assert arena is not None
    gone = SimulatedEvent(streams.device)
    streams.compute.wait(gone)
    held = [streams.save(streams.make(4))]
    engine.finish_forward(streams.tape)
    held.clear()
    gc.collect()
    with pytest.raises(TimeoutError, match="a rank that is gone"):
        engine.close()
    assert arena.allocated and arena.mapped, "the copy may still write there"
    gone.complete()
    streams.device.synchronize()
    streams.machine.close()


def test_what_was_brought_back_is_let_go_with_the_graph_while_the_drive_still_writes(
    streams: Streams,
) -> None:
    """1. tensors are in staging buffers, and being written; 2. backward is near; 3. the graph is dropped."""
    held = [streams.save(streams.make(number + 1)) for number in range(32)]
    streams.end_of_forward()
    back = [one.region for one in held if one.region.transfer.loaded is not None]
    writing = [region for region in back if not region.transfer.operation.cancel()]
    assert writing and all(region.transfer.state is State.STORING for region in writing)
    held.clear()
    gc.collect()
    streams.engine.drain()
    for region in writing:
        assert region.transfer.state is State.RELEASED and region.transfer.lease is not None
        assert region.transfer.loaded is None
    streams.check()


def test_a_closed_engine_begins_no_copy_from_a_pinned_host_tier() -> None:
    """1. tensors are there; 2. the engine closes, and waits for copies; 3. backward; 4. the tier is unmapped."""
    streams = Streams(host_bytes=16 * MiB)
    held = [streams.save(streams.make(number + 1)) for number in range(32)]
    streams.engine.finish_forward(streams.tape)
    streams.device.synchronize()
    streams.engine.drain()
    streams.engine.prefetch(streams.tape)
    stored = [one for one in held if one.region.transfer.state is State.STORED]
    assert stored
    streams.engine.close()
    with pytest.raises(RuntimeError, match="after the offload engine was closed"):
        streams.engine.unpack(stored[0])
    assert streams.engine.mover.transfer.passing() is None
    streams.machine.close()


def test_what_is_on_the_device_is_handed_out_also_after_a_close_that_timed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. a copy to the host tier waits for a peer that is gone; 2. close gives up; 3. the tensor has not left the device."""
    monkeypatch.setattr(engine_module, "PATIENCE", 0.5)
    streams = Streams(host_bytes=MiB)
    streams.compute.wait(SimulatedEvent(streams.device))
    tensor = streams.make(4)
    held = streams.save(tensor)
    streams.engine.finish_forward(streams.tape)
    assert held.region.transfer.state is State.STORING and held.region.in_tensor
    with pytest.raises(TimeoutError, match="a rank that is gone"):
        streams.engine.close()
    streams.machine.close()
    assert streams.engine.unpack(held).data_ptr() == tensor.data_ptr()


def test_a_host_tier_alone_stages_nothing() -> None:
    """Tensors larger than the arena, of which many are under way: all leave, and the host waits for none."""
    layers = (LayerTimes(0.01, 0.02, (8 * MiB,)),) * 8
    with Machine(8 * MiB / 0.02, []) as machine:
        engine = machine.engine(
            EngineOptions(min_bytes=1024, buffer=2 * MiB, staged=True), host_bytes=96 * MiB
        )
        train(machine, engine, layers)
        record, found = train(machine, engine, layers, seed=1), engine.snapshot()
    assert not record.wrong and found.offloaded_bytes == 2 * keep_peak(layers)
    assert found.store_wait_seconds == 0 and found.kept_late_bytes == 0
    assert found.activation_peak_bytes <= 4 * 8 * MiB
