"""The simulated device does what a real one would, and finds what would go wrong there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.simulated_device import GB, LOADS, measure
from ssdtrain.offload.options import EngineOptions
from tests.support.simulated.device import POISON, SimulatedDevice
from tests.support.simulated.measure import overlap
from tests.support.simulated.timeline import Deadlock, Timeline
from tests.support.simulated.training import LayerTimes, Machine, train

MiB = 1 << 20


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(Timeline(), pcie=1e6, launch_seconds=0.0)


def test_actions_run_in_the_order_of_their_times() -> None:
    timeline, seen = Timeline(), []
    timeline.at(2.0, lambda: seen.append("b"))
    timeline.at(1.0, lambda: seen.append("a"))
    timeline.at(2.0, lambda: seen.append("c"))
    timeline.spend(1.5)
    assert seen == ["a"] and timeline.now == 1.5
    timeline.spend(1.0)
    assert seen == ["a", "b", "c"]


def test_waiting_for_what_cannot_happen_is_an_error_and_a_timeout_is_none() -> None:
    timeline = Timeline()
    assert not timeline.wait_for(lambda: False, timeout=3.0)
    assert timeline.now == 3.0
    with pytest.raises(Deadlock):
        timeline.wait_for(lambda: False)


def test_work_of_a_stream_is_in_order_and_that_of_two_streams_overlaps(device: SimulatedDevice) -> None:
    device.compute.work(1.0, label="a")
    device.compute.work(1.0, label="b")
    device.store.work(1.5, label="c")
    device.synchronize()
    assert [(item.start, item.end) for item in device.compute.log] == [(0.0, 1.0), (1.0, 2.0)]
    assert device.timeline.now == 2.0
    assert overlap(device.store.log, device.compute.log) == 1.0
    assert overlap(device.compute.log, device.store.log) == pytest.approx(0.75)


def test_a_copy_brings_what_the_kernel_before_it_wrote(device: SimulatedDevice) -> None:
    source, target = device.empty(1000), torch.zeros(1000, dtype=torch.uint8)
    device.compute.work(1.0, end=lambda: source.fill_(7))
    event = device.copy_to_host(source.data_ptr(), target.data_ptr(), 1000)
    device.timeline.spend(0.5)
    assert not event.query()
    device.synchronize()
    assert event.query() and bool((target == 7).all())


def test_memory_that_was_let_go_of_too_early_is_overwritten(device: SimulatedDevice) -> None:
    source, target = device.empty(1000), torch.zeros(1000, dtype=torch.uint8)
    source.fill_(7)
    device.compute.work(1.0)
    device.copy_to_host(source.data_ptr(), target.data_ptr(), 1000)  # waits for the kernel
    device.timeline.spend(1.0001)
    del source  # the copy is under way, and nothing holds back what comes after it on the compute stream
    device.synchronize()
    assert device.violations == ["D2H: the source changed during the copy"]


def test_memory_is_reused_at_once_and_poisoned(device: SimulatedDevice) -> None:
    first = device.empty(1000)
    first.fill_(7)
    address = first.data_ptr()
    del first
    second = device.empty(900)
    assert second.data_ptr() == address
    assert bool((second == POISON).all())


def test_a_blocked_host_is_counted(device: SimulatedDevice) -> None:
    device.compute.work(2.0)
    event = device.compute.record()
    event.synchronize()
    assert (device.host_syncs, device.host_sync_seconds) == (1, 2.0)


def test_a_step_that_keeps_takes_the_sum_of_its_layers() -> None:
    machine = Machine(1e9, [(1e9, 1e9)])
    record = train(machine, None, [LayerTimes(0.001, 0.002, (4096, 8192))] * 5)
    assert record.ended - record.began == pytest.approx(0.015, rel=0.02)
    assert not record.wrong and not record.to_host


def test_figures_are_exactly_repeatable() -> None:
    load = LOADS["gpt 24 layers, 4 microbatches"](25 * GB)
    small = dataclasses.replace(load, layers=load.layers[:48], microbatches=2, in_flight=4 * MiB)
    timed = ("store_wait_seconds", "load_wait_seconds")  # of the real clock
    first, second = (
        {name: value for name, value in measure(small).items() if name not in timed} for _ in range(2)
    )
    assert first == second
    assert first["bits_equal"] and first["offloaded_share"] > 0.2


def test_a_wrong_byte_is_found() -> None:
    with Machine(400e6, [(200e6, 200e6)]) as machine:
        engine = machine.engine(
            EngineOptions(min_bytes=1024, in_flight=4 * MiB, buffer=16 * MiB, staged=True)
        )
        read = machine.pool._bytes
        layers = [LayerTimes(0.001, 0.001, (MiB,))] * 6

        class Spoilt(dict):  # type: ignore[type-arg]
            def __getitem__(self, place: tuple[int, int]) -> bytes:
                return bytes(len(read[place]))

            def __setitem__(self, place: tuple[int, int], value: bytes) -> None:
                read[place] = value

        machine.pool._bytes = Spoilt()
        record = train(machine, engine, layers)
        assert record.wrong
