"""GB/s of every codec and direction on one core, beside a copy of the same tensor and the reference ZFP in the same run.

    python -m benchmarks.codecs --json

Every figure is a median over rounds; a round runs everything once, so that what a busy machine takes away it takes from all.
Time is CPU time of the one thread that works, which is elapsed time on an idle machine. "input" is GB/s of float32 (or bfloat16)
values read or written, "payload" GB/s of encoded bytes: a 10 Gbit/s link carries 1.25 GB/s of payload.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import finish, hardware, parser
from ssdtrain.tools.bench.codec import CodecSubject, cpu_seconds

LINK_GB_PER_SECOND = 1.25
FLOAT_SPECS = (
    "exact",
    "bf16",
    "int8",
    "int8:round=stochastic",
    "int4",
    "int4:round=stochastic",
    "int4:block=64,asymmetric",
    "int4:hadamard",
    "int2:block=32,asymmetric",
    "fp8",
    "zfp:rate=8",
    "zfp:rate=16",
)
BF16_SPECS = ("int8", "int4", "exact", "lossless")
ZFPY_RATES = (8, 16)


class Zfpy(CodecSubject):
    """The reference library through its Python binding, which allocates what it returns."""

    def __init__(self, rate: int, x: Tensor) -> None:
        import zfpy

        array = x.numpy()
        stream = zfpy.compress_numpy(array, rate=rate)
        self.name = f"zfpy rate={rate}"
        self.payload_bytes = len(stream)
        self.value_bytes = x.nbytes
        self.directions = {
            "encode": lambda: zfpy.compress_numpy(array, rate=rate),
            "decode": lambda: zfpy.decompress_numpy(stream),
        }


def measure(mebibytes: int, rounds: int, specs: list[str] | None = None) -> dict[str, Any]:
    """Figures by name. `mebibytes` is the size of the float32 tensor; use one that is larger than the last-level cache."""
    torch.set_num_threads(1)
    x = torch.randn(mebibytes << 18, generator=torch.Generator().manual_seed(0)) * 0.02
    half, copy = x.bfloat16(), torch.empty_like(x)
    mask = x > 0
    subjects: list[CodecSubject] = [CodecSubject(spec, x) for spec in specs or FLOAT_SPECS]
    if specs is None:
        subjects += [CodecSubject(spec, half) for spec in BF16_SPECS] + [CodecSubject("mask", mask)]
        subjects += [Zfpy(rate, x) for rate in ZFPY_RATES]
    seconds: dict[tuple[str, str], list[float]] = {}
    copies: list[float] = []
    for _ in range(rounds):
        copies.append(cpu_seconds(lambda: copy.copy_(x)))
        for subject in subjects:
            for direction, work in subject.directions.items():
                seconds.setdefault((subject.name, direction), []).append(cpu_seconds(work))
    figures: dict[str, Any] = {"copy GB/s": x.nbytes / statistics.median(copies) / 1e9}
    for subject in subjects:
        for direction in subject.directions:
            median = statistics.median(seconds[subject.name, direction])
            payload = subject.payload_bytes / median / 1e9
            label = f"{subject.name} {direction}"
            figures[f"{label} input GB/s"] = subject.value_bytes / median / 1e9
            figures[f"{label} payload GB/s"] = payload
            figures[f"{label} cores for 10 Gbit/s"] = LINK_GB_PER_SECOND / payload
    return figures


def main() -> None:
    arguments = parser(__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--mebibytes", type=int, default=64, help="size of the float32 tensor")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--codec", action="append", help="only these codecs, on float32")
    chosen = arguments.parse_args()
    figures = measure(chosen.mebibytes, chosen.rounds, chosen.codec)
    finish({"benchmark": "codecs", **hardware(), "mebibytes": chosen.mebibytes, **figures}, chosen.json)


if __name__ == "__main__":
    main()
