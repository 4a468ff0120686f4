"""Device memory that is reserved for loads: what a copy into it waits for, and that nothing keeps what is given up."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest
import torch

from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.offload.transfer.targets import LoadTargets, NoTargetYet
from tests.support.simulated.device import SimulatedDevice, Stream
from tests.support.simulated.timeline import Timeline


def made(*, waits: bool = True) -> tuple[SimulatedDevice, LoadTargets]:
    device = SimulatedDevice(Timeline(), pcie=1e6, launch_seconds=0.0)
    return device, LoadTargets(device, ActivationMeter(), waits=waits)


def used(device: SimulatedDevice, targets: LoadTargets) -> int:
    """The address of memory that a kernel of the current stream reads and nobody holds."""
    target = targets.reserve(1024)
    tensor = targets.take(target)
    target.streams.append(device.current_stream())
    device.compute.work(1.0)
    del tensor
    return target.memory.address


def test_the_next_copy_waits_for_who_used_the_memory_before() -> None:
    device, targets = made()
    address = used(device, targets)
    second = targets.reserve(1024)
    assert second.memory.address == address and len(second.memory.awaited) == 1
    assert not second.memory.awaited[0].query()
    device.synchronize()
    assert second.memory.awaited[0].query()


def test_a_target_has_the_form_of_the_tensor_that_comes_back() -> None:
    """Each is a tensor of its own, whose death is noticed, over memory that is used again."""
    device, targets = made()
    form = torch.bfloat16, torch.Size((4, 1, 128)), (1, 4, 4), 0
    address = 0
    for _ in range(2):
        target = targets.reserve(1024, form=form)
        tensor = targets.take(target)
        assert target.form is form and tensor._base is None and tensor._version == 0
        assert (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) == form
        assert tensor.data_ptr() == target.address and address in (0, target.address)
        address = target.address
        target.streams.append(device.current_stream())
        device.compute.work(1.0)  # so that the memory is not given back
        del tensor
    aligned = targets.reserve(1024, lead=8, form=form)  # it begins elsewhere in its memory
    assert aligned.form is None and targets.take(aligned).dtype is torch.uint8 and aligned.address % 64 == 8


def test_the_next_copy_waits_for_every_stream_that_was_handed_the_memory() -> None:
    """A branch of the model that runs on a stream of its own, as overlapped experts do, reads what another one saved too."""
    device, targets = made()
    side = Stream(device, "side")
    device.streams.append(side)
    first = targets.reserve(1024)
    tensor = targets.take(first)
    first.streams.append(device.current_stream())
    with device.stream(side):
        first.streams.append(device.current_stream())
        side.work(2.0)
    device.compute.work(1.0)
    del tensor
    second = targets.reserve(1024)
    assert second.memory.address == first.memory.address
    zeros, tensor = torch.zeros(1024, dtype=torch.uint8), targets.take(second)
    event = device.copy_to_device(zeros.data_ptr(), tensor.data_ptr(), 1024, second.memory.awaited)
    device.synchronize()
    assert event.when is not None and event.when >= 2.0


def test_a_target_that_is_given_up_leaves_its_waits_to_the_next() -> None:
    device, targets = made()
    address = used(device, targets)
    second = targets.reserve(1024)
    second.tensor = None  # never copied into
    third = targets.reserve(1024)
    assert third.memory.address == address
    assert third.memory.awaited and not any(event.query() for event in third.memory.awaited)


def test_what_is_given_up_is_free_again() -> None:
    device, targets = made()
    for _ in range(5):
        target = targets.reserve(1024)
        target.tensor = None
        del target
    gc.collect()
    targets.reserve(1024)
    assert targets._alive_bytes == 1024 and not targets._pending
    free = sum(len(blocks) for (stream, _), blocks in device._free.items() if stream is device.load)
    assert free == 0, "one block was enough"


def test_memory_that_a_kernel_reads_does_not_leave_the_process() -> None:
    """1. backward queues a kernel that reads a target; 2. drops it; 3. free memory is given back; 4. the kernel reads."""
    for noticed in (False, True):
        device, targets = made()
        target = targets.reserve(1024)
        tensor = targets.take(target)
        tensor.fill_(7)
        target.streams.append(device.current_stream())
        address, found = tensor.data_ptr(), []
        device.compute.work(1.0, end=lambda at=address, to=found: to.append(ctypes.string_at(at, 1024)))
        del tensor
        if noticed:
            targets.note_deaths()
        device.empty_cache(device.load)
        device.synchronize()
        assert found == [bytes([7]) * 1024]


def test_memory_is_used_again_only_for_what_needs_most_of_it() -> None:
    device, targets = made()
    first = targets.reserve(8192)
    tensor = targets.take(first)
    first.streams.append(device.current_stream())
    device.compute.work(1.0)
    address = tensor.data_ptr()
    del tensor
    small, large = targets.reserve(4095), targets.reserve(4096)
    assert small.memory.address != address and not small.memory.awaited
    assert large.memory.address == address and len(large.memory.awaited) == 1
    assert large.tensor.untyped_storage().nbytes() == 4096


def test_memory_that_is_out_of_use_serves_the_next_load_while_loads_go_on() -> None:
    _, targets = made()
    first, second = targets.reserve(4096), targets.reserve(4096)
    loaded = [targets.take(first), targets.take(second)]
    addresses = {first.memory.address, second.memory.address}
    # 1. One dies, and nothing uses its memory: the next load gets it.
    del loaded[0], first
    targets.note_deaths()
    third = targets.reserve(4096)
    assert third.memory.address in addresses
    loaded.append(targets.take(third))
    # 2. Memory of another size is not kept for it.
    logits = targets.take(targets.reserve(1 << 20))
    loaded.append(targets.take(targets.reserve(4096)))
    del logits
    targets.note_deaths()
    assert not targets._pending
    # 3. Nor is any where no load goes on.
    loaded.clear()
    targets.note_deaths()
    assert not targets._pending and not targets._alive_bytes


@pytest.mark.parametrize("waits", [True, False])
def test_memory_for_a_load_that_needs_it_no_more_is_there_for_others(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. memory is made for a load; 2. that one is given up; 3. another load finds no memory beside it."""
    device, targets = made(waits=False)
    lock = threading.Lock()
    with pytest.raises(NoTargetYet):
        targets.reserve(1 << 20)
    targets.allocate(lock)
    load_target = device.load_target

    def of_one_mebibyte(nbytes: int) -> torch.Tensor:
        if targets._allocated is not None:
            raise torch.OutOfMemoryError("1 MiB is all there is")
        return load_target(nbytes)

    monkeypatch.setattr(device, "load_target", of_one_mebibyte)
    if waits:
        with targets.waiting():
            targets.reserve(1 << 10)
        return
    with pytest.raises(NoTargetYet):
        targets.reserve(1 << 10)
    targets.allocate(lock)
    targets.reserve(1 << 10)
