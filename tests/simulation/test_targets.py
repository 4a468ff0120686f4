"""Device memory that is reserved for loads: what a copy into it waits for, and that nothing keeps what is given up."""

from __future__ import annotations

import gc

from benchmarks.simulation.device import SimulatedDevice
from benchmarks.simulation.timeline import Timeline
from ssdtrain.offload.targets import LoadTargets


def made() -> tuple[SimulatedDevice, LoadTargets]:
    device = SimulatedDevice(Timeline(), pcie=1e6, launch_seconds=0.0)
    return device, LoadTargets(device)


def test_the_next_copy_waits_for_who_used_the_memory_before() -> None:
    device, targets = made()
    first = targets.reserve(1024)
    tensor = targets.take(first)
    targets.hand_out(first)
    device.compute.work(1.0)
    del tensor
    second = targets.reserve(1024)
    assert second.start == first.start and len(second.awaited) == 1
    assert not second.awaited[0].query()
    device.synchronize()
    assert second.awaited[0].query()


def test_a_target_that_is_given_up_leaves_its_waits_to_the_next() -> None:
    device, targets = made()
    first = targets.reserve(1024)
    tensor = targets.take(first)
    targets.hand_out(first)
    device.compute.work(1.0)
    del tensor
    second = targets.reserve(1024)
    second.tensor = None  # never copied into
    third = targets.reserve(1024)
    assert third.start == first.start
    assert third.awaited and not any(event.query() for event in third.awaited)


def test_what_is_given_up_is_free_again() -> None:
    device, targets = made()
    for _ in range(5):
        target = targets.reserve(1024)
        target.tensor = None
        del target
    gc.collect()
    targets.reserve(1024)
    assert len(targets._targets) == 1
    free = sum(len(blocks) for (stream, _), blocks in device._free.items() if stream is device.load)
    assert free == 0, "one block was enough"
