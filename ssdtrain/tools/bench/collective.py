"""Compressed all-reduces beside plain ones, between the ranks of a process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.comm import Communicator
from ssdtrain.comm.policy import Policy
from ssdtrain.config import load_config
from ssdtrain.tools.bench.ratios import paired_ratio, synchronize

BENCH_PRESETS = ("safe", "balanced", "aggressive")


def measure_collectives(
    presets: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    device: torch.device,
    *,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All-reduces float32 gradients of each size in bytes, plainly and by each preset in turn. Collective: all ranks call it,
    in an initialised process group.

    Returns:
        The same on every rank; times are those of the slowest.
    """
    ways: dict[str, Communicator | None] = {"plain": None}
    for preset in presets:
        # What is measured is what compression does once it is on: no warm-up, and no probe that turns it off.
        section = {"preset": preset, "warmup_steps": 0, "probe": False, "min_bytes": 0, "feedback": "off"}
        config = load_config({"comm": section}).comm
        assert config is not None
        ways[preset] = Communicator(Policy.from_config(config), device)
    figures: dict[str, Any] = {"ranks": dist.get_world_size(), "device": str(device), "sizes": {}}
    for nbytes in sizes:
        tensor = torch.randn(nbytes // 4, device=device) * 0.01
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, comm in ways.items():
                taken = _timed(comm, tensor.clone(), device)
                if number:  # the first finds its buffers
                    seconds[name].append(taken)
            note(f"{nbytes >> 20} MiB, round {number} of {rounds}")
        every = torch.tensor(list(seconds.values()), dtype=torch.float64, device=device)
        dist.all_reduce(every, op=dist.ReduceOp.MAX)
        slowest = dict(zip(ways, every.tolist(), strict=True))
        figures["sizes"][nbytes] = {
            name: {"seconds": statistics.median(found), "speedup": paired_ratio(slowest["plain"], found)}
            for name, found in slowest.items()
        }
    figures["wire_ratio"] = {
        name: comm.metrics()["dp"].ratio for name, comm in ways.items() if comm is not None
    }
    return figures


def _timed(comm: Communicator | None, tensor: torch.Tensor, device: torch.device) -> float:
    synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    work = None if comm is None else comm.all_reduce(tensor, "dp")
    if work is None:
        dist.all_reduce(tensor)
    else:
        work.wait()
    synchronize(device)
    return time.perf_counter() - began
