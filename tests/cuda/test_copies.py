"""Copies and events of the engine's own, in C and in Python, on a device whose work comes late."""

from __future__ import annotations

import importlib.util

import emulated_cuda
import pytest
import torch

from ssdtrain.device import CudaDevice
from ssdtrain.device.runtime import loaded_cuda_runtime
from ssdtrain.device.streams import PythonStreams, Streams, make_streams

NBYTES = 1 << 16


@pytest.fixture(params=["c", "python"])
def layer(request: pytest.FixtureRequest, device: torch.device) -> CudaDevice:
    made = CudaDevice(device)
    made._streams = streams_of(request.param)
    return made


def streams_of(kind: str) -> Streams:
    if kind == "python":
        return PythonStreams(0, loaded_cuda_runtime())
    if importlib.util.find_spec("ssdtrain.device._streams") is None:
        pytest.skip("the C extension was not built")
    return make_streams(0)


@pytest.mark.usefixtures("late")
def test_a_copy_follows_what_made_its_bytes_and_the_events_that_it_is_given(layer: CudaDevice) -> None:
    host = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    back = layer.load_target(NBYTES)
    side = torch.cuda.Stream()
    for value in range(20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            source = torch.full((NBYTES,), value, dtype=torch.uint8, device="cuda")
            stored = layer.copy_to_host(source.data_ptr(), host.data_ptr(), NBYTES)
            assert stored is not None
            layer.wait(stored)
            del source  # its memory may be used again by what is queued on this stream next
            torch.full((NBYTES,), 255, dtype=torch.uint8, device="cuda")
        loaded = layer.copy_to_device(host.data_ptr(), back.data_ptr(), NBYTES, [stored])
        assert loaded is not None
        layer.wait(loaded)
        assert torch.equal(back.cpu(), torch.full((NBYTES,), value, dtype=torch.uint8))
        assert stored.query() and loaded.query()


@pytest.mark.usefixtures("late")
def test_a_stream_waits_for_what_was_recorded_and_not_for_what_a_handle_is_used_for_later(
    layer: CudaDevice,
) -> None:
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    first = layer.record(fast.cuda_stream)
    assert first is not None
    layer.wait(first, fast.cuda_stream)
    handle = layer.event_handle(first)
    layer._recent.clear()
    del first
    with torch.cuda.stream(slow):
        torch.cuda._sleep(300_000_000)
    again = layer.record(slow.cuda_stream)
    assert again is not None and layer.event_handle(again) == handle, "it was not used again"
    ended = layer.record(fast.cuda_stream)
    assert ended is not None and layer.block(ended, 10) and not again.query()
    assert layer.block(again, 10) and again.query()


def test_handles_are_made_once_and_on_the_device(layer: CudaDevice) -> None:
    host = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    memory = layer.load_target(NBYTES)
    made = None
    for _ in range(3):
        before = emulated_cuda.counts()
        for _ in range(50):
            event = layer.copy_to_device(host.data_ptr(), memory.data_ptr(), NBYTES)
            event.synchronize()
            layer._recent.clear()
        counts = emulated_cuda.counts()
        name = "cudaEventCreateWithFlags"
        made = counts[name] - before.get(name, 0)
    assert made == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices (EMULATED_DEVICES)")
def test_another_device_may_be_current(layer: CudaDevice) -> None:
    host = torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8).pin_memory()
    with torch.cuda.device(1):
        memory = layer.load_target(NBYTES)
        assert memory.device == torch.device("cuda", 0)
        event = layer.copy_to_device(host.data_ptr(), memory.data_ptr(), NBYTES)
        layer.wait_stream(torch.cuda.Stream(0).cuda_stream)
        event.synchronize()
        assert torch.cuda.current_device() == 1
    assert torch.equal(memory.cpu(), host)


@pytest.mark.usefixtures("late")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices (EMULATED_DEVICES)")
def test_the_default_stream_is_that_of_the_device_where_another_is_current(layer: CudaDevice) -> None:
    host = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    source = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0")
    back = torch.zeros_like(source)
    slow = torch.cuda.Stream(0)
    for value in range(1, 4):
        torch.cuda._sleep(3_000_000)
        source.fill_(value)
        with torch.cuda.device(1):
            stored = layer.copy_to_host(source.data_ptr(), host.data_ptr(), NBYTES)
            assert stored is not None
            layer.wait(stored)
        source.fill_(255)
        with torch.cuda.stream(slow):
            torch.cuda._sleep(3_000_000)
        with torch.cuda.device(1):
            slept = layer.record(slow.cuda_stream)
            assert slept is not None
            after = [stored, slept]
            loaded = layer.copy_to_device(host.data_ptr(), back.data_ptr(), NBYTES, after)
            assert loaded is not None
            layer.wait(loaded)
            layer.wait_stream(slow.cuda_stream)
        found = back.clone()
        assert torch.equal(found.cpu(), torch.full_like(host, value))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices (EMULATED_DEVICES)")
def test_an_error_of_the_runtime_is_raised_and_not_left_for_the_next_kernel(layer: CudaDevice) -> None:
    other = torch.cuda.Stream(1)
    with pytest.raises(RuntimeError, match="invalid"):
        layer._streams.record(other.cuda_stream)
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
