"""Runs a function on several gloo ranks, each a process of its own."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "ssdtrain.comm", "ssdtrain.runtime"])


def _run(
    rank: int,
    count: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    nodes: list[str] | None,
    sink: Any,
    meet: bool = True,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if nodes is not None:
        os.environ["SSDTRAIN_NODE"] = nodes[rank]
    try:
        dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=60))
        found = io.BytesIO()
        # As bytes: a tensor in a queue is a file of its sender's, which is gone by the time that somebody looks.
        torch.save(function(rank, *arguments), found)
        if meet:
            dist.barrier()
            dist.destroy_process_group()
        sink.put((rank, None, found.getvalue()))
    except BaseException:
        sink.put((rank, traceback.format_exc(), b""))
        raise


def on_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    nodes: list[str] | None = None,
    timeout: float = 120,
) -> list[Any]:
    """What `function(rank, *arguments)` returned on each of `count` ranks.

    Args:
        function: of a module, so that processes find it.
        nodes: the name of each rank's node; None: all on this one.

    Raises:
        AssertionError: a rank raised, or took longer than `timeout` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sink = _context.Queue()
    processes = [
        _context.Process(target=_run, args=(rank, count, port, function, arguments, nodes, sink), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
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


def survivors(count: int, function: Callable[..., Any], timeout: float = 120) -> list[Any]:
    """What `function(rank)` returned on the ranks that lived to return."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sink = _context.Queue()
    processes = [
        _context.Process(target=_run, args=(rank, count, port, function, (), None, sink, False), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
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
