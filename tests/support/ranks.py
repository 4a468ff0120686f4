"""Runs a function on several gloo ranks, each a process of its own."""

from __future__ import annotations

import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.two_nodes.ports import free_port

PATIENCE = timedelta(seconds=240)
"""A limit for ranks that hang, below that of pytest for a test: on a busy machine one may be far behind the other."""

_context = multiprocessing.get_context("forkserver")
# What an optimizer and the wrappers import at their first use takes each rank seconds.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "ssdtrain.comm", "ssdtrain.runtime"]
)


def _join(rank: int, count: int, port: int, nodes: list[str] | None, backend: str = "gloo") -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if nodes is not None:
        os.environ["SSDTRAIN_NODE"] = nodes[rank]
    dist.init_process_group(backend, rank=rank, world_size=count, timeout=PATIENCE)


def _call(function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> bytes:
    """What it returned, as bytes: a tensor in a queue is a file of its sender's, gone when somebody looks."""
    found = io.BytesIO()
    torch.save(function(rank, *arguments), found)
    return found.getvalue()


def _run(
    rank: int,
    count: int,
    port: int,
    sink: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    nodes: list[str] | None,
    meet: bool,
    backend: str = "gloo",
) -> None:
    try:
        _join(rank, count, port, nodes, backend)
        found = _call(function, rank, arguments)
        if meet:
            dist.barrier()
            dist.destroy_process_group()
        sink.put((rank, None, found))
    except BaseException:
        sink.put((rank, traceback.format_exc(), b""))
        raise


def _serve(rank: int, count: int, port: int, calls: Any) -> None:
    _join(rank, count, port, None)
    while True:
        try:
            function, arguments = calls.recv()
        except EOFError:
            os._exit(0)
        try:
            calls.send((None, _call(function, rank, arguments)))
        except BaseException:
            calls.send((traceback.format_exc(), b""))
            raise


class StandingRanks:
    """Gloo ranks for several calls: what a framework imports at its first step takes seconds in every process.

    A call that fails ends them, and the next one starts others.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[Any] = []
        self._calls: list[Any] = []

    def __call__(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE.total_seconds()
    ) -> list[Any]:
        """As `on_ranks`."""
        if not self._processes:
            self._start()
        try:
            for calls in self._calls:
                calls.send((function, arguments))
            deadline = time.monotonic() + timeout
            waiting = dict(zip(self._calls, range(self._count), strict=True))
            found: dict[int, bytes] = {}
            while waiting:
                ready = wait(list(waiting), max(0, deadline - time.monotonic()))
                assert ready, f"ranks {sorted(waiting.values())} took longer than {timeout} seconds"
                for calls in ready:
                    rank = waiting.pop(calls)
                    try:
                        failure, found[rank] = calls.recv()
                    except EOFError:
                        failure = "it ended without a word"
                    assert failure is None, f"rank {rank}:\n{failure}"
        except BaseException:
            self.close()
            raise
        return [torch.load(io.BytesIO(found[rank]), weights_only=False) for rank in range(self._count)]

    def _start(self) -> None:
        port = free_port()
        for rank in range(self._count):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, self._count, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._calls.append(ours)

    def close(self) -> None:
        for calls in self._calls:
            calls.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._calls = [], []


def _started(count: int, *of_each: Any) -> tuple[Any, list[Any]]:
    """Processes that run `_run` with `of_each`, and the queue of what they return."""
    port, sink = free_port(), _context.Queue()
    processes = [
        _context.Process(target=_run, args=(rank, count, port, sink, *of_each), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    return sink, processes


def on_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    nodes: list[str] | None = None,
    timeout: float = PATIENCE.total_seconds(),
    backend: str = "gloo",
) -> list[Any]:
    """What `function(rank, *arguments)` returned on each of `count` ranks.

    Args:
        function: of a module, so that processes find it.
        nodes: the name of each rank's node; None: all on this one.
        backend: of the group of all ranks.

    Raises:
        AssertionError: a rank raised, or took longer than `timeout` seconds.
    """
    sink, processes = _started(count, function, arguments, nodes, True, backend)
    try:
        results: dict[int, Any] = {}
        for _ in processes:
            rank, failure, found = sink.get(timeout=timeout)
            assert failure is None, f"rank {rank}:\n{failure}"
            results[rank] = torch.load(io.BytesIO(found), weights_only=False)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    return [results[rank] for rank in range(count)]


def survivors(
    count: int, function: Callable[..., Any], timeout: float = PATIENCE.total_seconds()
) -> list[Any]:
    """What `function(rank)` returned on the ranks that lived to return."""
    sink, processes = _started(count, function, (), None, False)
    found = []
    try:
        for process in processes:
            process.join(timeout)
        for process in processes:
            if process.exitcode == 0:
                _, failure, result = sink.get(timeout=timeout)
                assert failure is None, failure
                found.append(torch.load(io.BytesIO(result), weights_only=False))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found
