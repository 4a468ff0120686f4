"""Capture of CUDA graphs, and replay: what CUDA's programming guide permits and forbids."""

from __future__ import annotations

import ctypes
import threading

import emulated_cuda
import pytest
import torch

from tests.cuda import calls
from tests.cuda.calls import POINTER, call, new_event, new_stream, ok, sleep


def begin(mode: int = calls.GLOBAL) -> POINTER:
    stream = new_stream()
    ok("cudaStreamBeginCapture", stream, mode)
    return stream


def end(stream: POINTER) -> str:
    return call("cudaStreamEndCapture", stream, ctypes.byref(POINTER()))


def test_what_is_captured_runs_at_each_replay_and_not_before(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        x.copy_(y)
    assert x.sum().item() == 0
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3.0] * 4


def test_a_graph_draws_other_numbers_at_each_replay(device: torch.device) -> None:
    graph = torch.cuda.CUDAGraph()
    torch.manual_seed(3)
    with torch.cuda.graph(graph):
        x = torch.rand(100, device=device)
    torch.manual_seed(3)
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(x.clone())
    assert not torch.equal(*draws)
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(x, draws[0])


def test_another_stream_joins_by_an_event_and_must_come_back(device: torch.device) -> None:
    stream, other, fork, join = begin(), new_stream(), new_event(), new_event()
    ok("cudaEventRecord", fork, stream)
    ok("cudaStreamWaitEvent", other, fork, 0)
    sleep(0, other)
    assert end(other) == "cudaErrorStreamCaptureUnmatched"
    assert end(stream) == "cudaErrorStreamCaptureInvalidated"
    stream = begin()
    ok("cudaEventRecord", fork, stream)
    ok("cudaStreamWaitEvent", other, fork, 0)
    sleep(0, other)
    assert end(stream) == "cudaErrorStreamCaptureUnjoined"
    stream = begin()
    ok("cudaEventRecord", fork, stream)
    ok("cudaStreamWaitEvent", other, fork, 0)
    sleep(0, other)
    ok("cudaEventRecord", join, other)
    ok("cudaStreamWaitEvent", stream, join, 0)
    assert end(stream) == "cudaSuccess"


def test_branches_of_a_graph_come_in_every_order_that_they_may(device: torch.device) -> None:
    x = torch.zeros(8, device=device)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        z = x * 3
        torch.cuda.current_stream().wait_stream(side)
        total = y + z
    for seed in range(4):
        with emulated_cuda.settings(delay_ms=1, seed=seed):
            x.fill_(seed)
            graph.replay()
            assert total.tolist() == [5.0 * seed] * 8


@pytest.mark.parametrize("function", ["cudaStreamQuery", "cudaStreamSynchronize"])
def test_a_captured_stream_cannot_be_waited_for(function: str) -> None:
    stream = begin(calls.RELAXED)
    assert call(function, stream) == "cudaErrorStreamCaptureUnsupported"
    assert end(stream) == "cudaErrorStreamCaptureInvalidated"


@pytest.mark.parametrize("function", ["cudaEventQuery", "cudaEventSynchronize"])
def test_a_captured_event_cannot_be_waited_for(function: str) -> None:
    stream, event = begin(calls.RELAXED), new_event()
    ok("cudaEventRecord", event, stream)
    assert call(function, event) == "cudaErrorCapturedEvent"
    assert end(stream) == "cudaErrorStreamCaptureInvalidated"


def test_a_captured_stream_cannot_wait_for_what_is_outside() -> None:
    outside, event = new_stream(), new_event()
    ok("cudaEventRecord", event, outside)
    stream = begin()
    assert call("cudaStreamWaitEvent", stream, event, 0) == "cudaErrorStreamCaptureIsolation"
    assert end(stream) == "cudaErrorStreamCaptureInvalidated"


def test_two_captures_cannot_be_merged() -> None:
    first, second, event = begin(), begin(), new_event()
    ok("cudaEventRecord", event, first)
    assert call("cudaStreamWaitEvent", second, event, 0) == "cudaErrorStreamCaptureMerge"
    assert end(first) == end(second) == "cudaErrorStreamCaptureInvalidated"


def test_the_legacy_stream_is_neither_captured_nor_used_beside_a_captured_blocking_stream() -> None:
    assert call("cudaStreamBeginCapture", None, calls.RELAXED) == "cudaErrorStreamCaptureUnsupported"
    stream = new_stream(calls.BLOCKING_STREAM)
    ok("cudaStreamBeginCapture", stream, calls.RELAXED)
    assert call("cudaStreamSynchronize", None) == "cudaErrorStreamCaptureImplicit"
    assert end(stream) == "cudaErrorStreamCaptureInvalidated"


def test_a_capture_cannot_begin_twice_or_end_without_beginning() -> None:
    stream = begin()
    assert call("cudaStreamBeginCapture", stream, calls.GLOBAL) == "cudaErrorIllegalState"
    assert end(stream) == "cudaErrorStreamCaptureInvalidated"
    assert end(stream) == "cudaErrorIllegalState"


UNSAFE = ["cudaMalloc", "cudaEventQuery"]


def unsafe(function: str) -> str:
    """A call that CUDA says is potentially unsafe during a capture, on things that no capture knows."""
    if function == "cudaMalloc":
        return call(function, ctypes.byref(POINTER()), 4096)
    return call(function, EVENT)


EVENT = POINTER()


@pytest.mark.parametrize("function", UNSAFE)
@pytest.mark.parametrize(
    ("capture", "thread", "fails"),
    [
        (calls.GLOBAL, calls.GLOBAL, True),
        (calls.GLOBAL, calls.THREAD_LOCAL, False),
        (calls.GLOBAL, calls.RELAXED, False),
        (calls.THREAD_LOCAL, calls.GLOBAL, False),
        (calls.RELAXED, calls.GLOBAL, False),
    ],
)
def test_unsafe_calls_of_another_thread_beside_a_capture(
    function: str, capture: int, thread: int, fails: bool
) -> None:
    """A watchdog that queries events beside a capture in global mode spoils it, unless it exchanges its own mode first."""
    global EVENT
    EVENT = new_event()
    stream, answers = begin(capture), []

    def other() -> None:
        mode = ctypes.c_int(thread)
        ok("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert mode.value == calls.GLOBAL, "that of a new thread"
        answers.append(unsafe(function))

    watchdog = threading.Thread(target=other)
    watchdog.start()
    watchdog.join()
    assert answers == ["cudaErrorStreamCaptureUnsupported" if fails else "cudaSuccess"]
    assert end(stream) == ("cudaErrorStreamCaptureInvalidated" if fails else "cudaSuccess")


@pytest.mark.parametrize("function", UNSAFE)
@pytest.mark.parametrize("mode", [calls.GLOBAL, calls.THREAD_LOCAL, calls.RELAXED])
def test_unsafe_calls_of_the_thread_that_captures(function: str, mode: int) -> None:
    global EVENT
    EVENT = new_event()
    stream = begin(mode)
    fails = mode != calls.RELAXED
    assert unsafe(function) == ("cudaErrorStreamCaptureUnsupported" if fails else "cudaSuccess")
    assert end(stream) == ("cudaErrorStreamCaptureInvalidated" if fails else "cudaSuccess")


def test_a_thread_ends_only_its_own_capture() -> None:
    stream, answers = begin(), []
    thread = threading.Thread(target=lambda: answers.append(end(stream)))
    thread.start()
    thread.join()
    assert answers == ["cudaErrorStreamCaptureWrongThread"]
    assert end(stream) == "cudaSuccess"


def test_a_step_of_training_in_a_graph(device: torch.device) -> None:
    def trained(captured: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(
            device
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(8, 16, device=device)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(3):
            step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()

    assert torch.equal(trained(False), trained(True))
