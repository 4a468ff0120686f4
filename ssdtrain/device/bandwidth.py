"""Bytes per second of copies within host memory, and between a CUDA device and the host, measured by a few of them."""

from __future__ import annotations

import functools
import time

import torch

__all__ = ["copy_bandwidths", "host_copy_bandwidth"]

LINK_PROBE = 64 << 20  # bytes of a copy by which a link is measured
HOST_COPY_PROBE = 16 << 20  # bytes of a copy by which the memory of a host is measured


@functools.cache
def host_copy_bandwidth() -> float:
    """Measure copies into fresh memory of the host, whose pages the system has yet to give, in bytes per second."""
    source = torch.zeros(HOST_COPY_PROBE, dtype=torch.uint8, device="cpu")
    began = time.perf_counter()
    for _ in range(2):
        source.clone()
    return 2 * HOST_COPY_PROBE / max(time.perf_counter() - began, 1e-9)


@functools.cache
def copy_bandwidths(device: torch.device) -> tuple[float, float, float]:
    """Measure a CUDA device's copies to pinned host memory, from it, and within device memory, in bytes per second. Blocks the
    host at the first call."""
    host = torch.empty(LINK_PROBE, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = torch.empty(LINK_PROBE, dtype=torch.uint8, device=device)
    half = LINK_PROBE // 2
    within = _rate(device, memory[:half], memory[half:])
    return _rate(device, memory, host), _rate(device, host, memory), within


def _rate(device: torch.device, source: torch.Tensor, target: torch.Tensor) -> float:
    target.copy_(source, non_blocking=True)  # the first one of a direction is slower
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    began.record(stream)
    target.copy_(source, non_blocking=True)
    ended.record(stream)
    ended.synchronize()
    return source.nbytes / max(began.elapsed_time(ended) / 1e3, 1e-9)
