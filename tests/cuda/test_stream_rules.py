"""Streams and events, as CUDA's programming guide and the reference of its runtime describe them."""

from __future__ import annotations

import ctypes
import threading
import time

import emulated_cuda
import torch

from tests.cuda import calls
from tests.cuda.calls import call, last_error, new_event, new_stream, ok, sleep


def test_work_of_a_stream_runs_in_order_and_without_the_host(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    torch.cuda.synchronize()
    sleep(100)
    for _ in range(50):
        x += 1
    assert call("cudaStreamQuery", None) == "cudaErrorNotReady", "the host has gone on"
    assert x.tolist() == [50.0] * 4


def test_streams_do_not_wait_for_each_other(device: torch.device) -> None:
    slow, fast = new_stream(), new_stream()
    sleep(300, slow)
    sleep(0, fast)
    ok("cudaStreamSynchronize", fast)
    assert call("cudaStreamQuery", slow) == "cudaErrorNotReady"
    ok("cudaStreamSynchronize", slow)
    ok("cudaStreamQuery", slow)


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(device: torch.device) -> None:
    blocking, other = new_stream(calls.BLOCKING_STREAM), new_stream(calls.BLOCKING_STREAM)
    sleep(200, blocking)
    sleep(0)  # the legacy stream
    sleep(0, other)
    assert call("cudaStreamQuery", other) == "cudaErrorNotReady"
    ok("cudaStreamSynchronize", other)
    ok("cudaStreamQuery", blocking)
    ok("cudaStreamQuery", None)


def test_a_non_blocking_stream_takes_no_notice_of_the_legacy_stream(device: torch.device) -> None:
    stream = new_stream(calls.NON_BLOCKING_STREAM)
    sleep(300)
    sleep(0, stream)
    ok("cudaStreamSynchronize", stream)
    assert call("cudaStreamQuery", None) == "cudaErrorNotReady"
    torch.cuda.synchronize()


def test_an_event_that_was_never_recorded_has_passed() -> None:
    event = new_event()
    ok("cudaEventQuery", event)
    ok("cudaEventSynchronize", event)
    ok("cudaStreamWaitEvent", new_stream(), event, 0)


def test_an_event_passes_when_its_stream_comes_to_it() -> None:
    stream, event = new_stream(), new_event()
    sleep(100, stream)
    ok("cudaEventRecord", event, stream)
    assert call("cudaEventQuery", event) == "cudaErrorNotReady"
    ok("cudaEventSynchronize", event)
    ok("cudaEventQuery", event)


def test_a_wait_is_for_the_record_that_was_made_before_it() -> None:
    first, second, waiting, event = new_stream(), new_stream(), new_stream(), new_event()
    ok("cudaEventRecord", event, first)
    ok("cudaStreamWaitEvent", waiting, event, 0)
    sleep(300, second)
    ok("cudaEventRecord", event, second)
    sleep(0, waiting)
    ok("cudaStreamSynchronize", waiting)
    assert call("cudaEventQuery", event) == "cudaErrorNotReady"
    ok("cudaEventSynchronize", event)


def test_a_wait_outlives_its_event() -> None:
    first, second, event = new_stream(), new_stream(), new_event()
    sleep(100, first)
    ok("cudaEventRecord", event, first)
    ok("cudaStreamWaitEvent", second, event, 0)
    ok("cudaEventDestroy", event)
    sleep(0, second)
    ok("cudaStreamSynchronize", second)
    ok("cudaStreamQuery", first)
    assert call("cudaEventQuery", event) == "cudaErrorInvalidResourceHandle"


def test_times_between_events() -> None:
    stream, first, last = new_stream(), new_event(), new_event()
    milliseconds = ctypes.c_float()

    def elapsed(begin: ctypes.c_void_p, end: ctypes.c_void_p) -> str:
        return call("cudaEventElapsedTime", ctypes.byref(milliseconds), begin, end)

    assert elapsed(first, last) == "cudaErrorInvalidResourceHandle", "neither was recorded"
    ok("cudaEventRecord", first, stream)
    sleep(50, stream)
    ok("cudaEventRecord", last, stream)
    assert elapsed(first, last) == "cudaErrorNotReady"
    ok("cudaEventSynchronize", last)
    assert elapsed(first, last) == "cudaSuccess"
    assert milliseconds.value >= 49.9
    without = new_event(calls.DISABLE_TIMING)
    ok("cudaEventRecord", without, stream)
    ok("cudaEventSynchronize", without)
    assert elapsed(first, without) == "cudaErrorInvalidResourceHandle"


def test_each_thread_has_its_own_last_error() -> None:
    last_error()
    assert call("cudaEventQuery", ctypes.c_void_p(8), remember=True) == "cudaErrorInvalidResourceHandle"
    other: list[str] = []
    thread = threading.Thread(target=lambda: other.append(last_error()))
    thread.start()
    thread.join()
    assert other == ["cudaSuccess"]
    assert call("cudaPeekAtLastError", remember=True) == "cudaErrorInvalidResourceHandle"
    assert last_error() == "cudaErrorInvalidResourceHandle"
    assert last_error() == "cudaSuccess"


def test_a_failed_kernel_breaks_the_device_for_good() -> None:
    done = calls.process("""
import torch
from tests.cuda.calls import call
x = torch.zeros(4, device="cuda")
x[torch.tensor([9], device="cuda")]  # out of range, which the host does not see
for function in ("cudaDeviceSynchronize", "cudaGetLastError", "cudaGetLastError"):
    print(call(function))
try:
    x + 1
except RuntimeError as error:
    print(str(error).splitlines()[0])
""")
    assert done.stdout.splitlines()[:3] == ["cudaErrorAssert"] * 3
    assert "device-side assert triggered" in done.stdout.splitlines()[3]


def test_priorities_are_brought_into_the_range() -> None:
    least, greatest = ctypes.c_int(), ctypes.c_int()
    ok("cudaDeviceGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    assert least.value == 0 > greatest.value
    stream, priority = ctypes.c_void_p(), ctypes.c_int()
    ok("cudaStreamCreateWithPriority", ctypes.byref(stream), 1, -100)
    ok("cudaStreamGetPriority", stream, ctypes.byref(priority))
    assert priority.value == greatest.value
    assert torch.cuda.Stream(priority=-1).priority == -1


def test_a_destroyed_stream_still_does_its_work() -> None:
    stream, event = new_stream(), new_event()
    sleep(100, stream)
    ok("cudaEventRecord", event, stream)
    ok("cudaStreamDestroy", stream)
    assert call("cudaStreamQuery", stream) == "cudaErrorInvalidResourceHandle"
    ok("cudaEventSynchronize", event)


def test_host_functions_run_in_the_order_of_their_stream() -> None:
    stream, ran = new_stream(), []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda argument: ran.append(argument))
    sleep(100, stream)
    for number in (1, 2, 3):
        ok("cudaLaunchHostFunc", stream, function, ctypes.c_void_p(number))
    assert not ran
    while call("cudaStreamQuery", stream) != "cudaSuccess":  # without holding the GIL for long
        time.sleep(0.01)
    assert ran == [1, 2, 3]


def test_delays_are_those_of_the_seed_and_change_no_result(device: torch.device) -> None:
    def result() -> torch.Tensor:
        side = torch.cuda.Stream()
        x = torch.arange(1000.0, device=device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return (x + y).cpu()

    expected = result()
    for seed in range(3):
        with emulated_cuda.settings(delay_ms=5, seed=seed):
            assert torch.equal(result(), expected)


def test_without_a_wait_a_late_stream_is_seen(device: torch.device) -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(1000, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x += 1
    seen = x.clone()  # does not wait for `side`
    torch.cuda.synchronize()
    assert seen.sum().item() == 0 and x.sum().item() == 1000


def test_kernels_take_the_time_that_is_set(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with emulated_cuda.settings(kernel_us=5000):
        begin.record()
        for _ in range(10):
            x += 1
        end.record()
        end.synchronize()
    assert begin.elapsed_time(end) >= 49.9


def test_waits_of_the_host_are_counted_by_call_and_thread(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    before = emulated_cuda.counts()
    y = x + 1
    event = torch.cuda.Event()
    event.record()
    assert not emulated_cuda.host_waits(before)
    event.synchronize()
    y.sum().item()
    torch.cuda.synchronize()
    waits = emulated_cuda.host_waits(before)
    assert {name.partition("@")[0]: number for name, number in waits.items()} == {
        "cudaEventSynchronize": 1,
        "cudaStreamSynchronize": 1,
        "cudaDeviceSynchronize": 1,
    }


def test_streams_and_events_belong_to_the_device_that_was_current() -> None:
    done = calls.process("""
import os
os.environ["EMULATED_DEVICES"] = "2"
import torch
from tests.cuda.calls import call, new_event, new_stream, ok
stream, event = new_stream(), new_event()
ok("cudaSetDevice", 1)
print(call("cudaEventRecord", new_event(), stream), call("cudaEventRecord", event, new_stream()))
ok("cudaEventRecord", event, stream)  # both are of device 0, whichever is current
ok("cudaStreamWaitEvent", new_stream(), event, 0)  # waits go across devices, and so do these
ok("cudaEventSynchronize", event)
ok("cudaEventQuery", event)
with torch.cuda.device(0):
    first = torch.cuda.current_stream()
try:
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.value, device=1)):
        torch.cuda._sleep(1)
except RuntimeError as error:
    print("kernel:", str(error).splitlines()[0])
""")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["cudaErrorInvalidResourceHandle"] * 2, done.stderr
    assert "invalid resource handle" in lines[1]
