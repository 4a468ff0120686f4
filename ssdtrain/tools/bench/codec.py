"""Codecs on one tensor: bytes a second in each direction, beside a copy of the tensor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssdtrain.codecs import Codec, Key, make_codec

SPECS = ("bf16", "int8", "int8:round=stochastic", "int4", "int4:hadamard", "int2:block=32,asymmetric", "fp8")


class CodecSubject:
    """One codec on one tensor: its name, its sizes, and its directions as functions to time."""

    def __init__(self, spec: str, x: Tensor) -> None:
        codec: Codec = make_codec(spec)
        if x.dtype not in codec.inputs:
            raise ValueError(
                f"codec {spec!r} does not encode {x.dtype}, which is measured; allowed: another codec"
            )
        buf = torch.empty(codec.max_payload_bytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
        out = torch.zeros_like(x)
        key = Key(0)
        self.name = spec if x.dtype == torch.float32 else f"{spec} of {str(x.dtype).removeprefix('torch.')}"
        self.payload_bytes = codec.encode(x, buf, key)
        self.value_bytes = x.nbytes
        self.directions: dict[str, Callable[[], object]] = {
            "encode": lambda: codec.encode(x, buf, key),
            "decode": lambda: codec.decode(buf, out),
        }
        if x.dtype == torch.float32:
            self.directions["accumulate"] = lambda: codec.decode(buf, out, accumulate=True)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time that `work` takes of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of the GPU `device`, on which `work` runs."""
    with torch.cuda.device(device):  # an event belongs to the device that is current when it is recorded
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def measure_codecs(
    specs: Sequence[str], nbytes: int, rounds: int, device: torch.device, *, note: Callable[[str], None]
) -> dict[str, Any]:
    """Encodes and decodes a float32 tensor of `nbytes` bytes. On a CPU one thread works, and its CPU time counts.

    Raises:
        ValueError, RuntimeError: no such codec, or a package that it needs is missing.
    """
    timed = partial(device_seconds, device=device) if device.type == "cuda" else cpu_seconds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = (torch.randn(max(1, nbytes // 4), generator=torch.Generator().manual_seed(0)) * 0.02).to(device)
        copy = torch.empty_like(x)
        subjects = [CodecSubject(spec, x) for spec in specs]
        seconds: dict[tuple[str, str], list[float]] = {}
        copies: list[float] = []
        for number in range(rounds):
            copies.append(timed(lambda: copy.copy_(x)))
            for subject in subjects:
                for direction, work in subject.directions.items():
                    seconds.setdefault((subject.name, direction), []).append(timed(work))
                note(f"{subject.name}, round {number + 1} of {rounds}")
    finally:
        torch.set_num_threads(threads)
    found = {
        subject.name: {
            "ratio": subject.payload_bytes / subject.value_bytes,
            **{
                f"{direction}_bytes_per_second": subject.value_bytes
                / max(1e-9, statistics.median(seconds[subject.name, direction]))
                for direction in subject.directions
            },
        }
        for subject in subjects
    }
    return {
        "device": str(device),
        "bytes": x.nbytes,
        "copy_bytes_per_second": x.nbytes / max(1e-9, statistics.median(copies)),
        "codecs": found,
    }
