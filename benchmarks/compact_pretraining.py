"""A LLaMA of 60 million parameters, whole, trained for some steps with compressed inputs: memory of the process, and loss.

    python -m benchmarks.compact_pretraining --json

Each variant trains in a process of its own, in float32 with AdamW, from the same weights on the same batches of the Python
standard library's sources. `peak_gib` is the most resident memory of the process above that before the model was made,
with glibc told to hand freed blocks back; it has weights, gradients, Adam's state, activations and logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import torch

from benchmarks.common import finish, hardware, parser
from benchmarks.compact import FULL, VARIANTS
from benchmarks.compact_training import LlamaConfig, train
from examples.support.process_memory import PeakMemory, return_freed_blocks
from ssdtrain.config.units import MiB

LLAMA_60M = LlamaConfig(layers=8, hidden=512, heads=8, middle=1376, vocabulary=32000)
TRIED = [FULL, "quant int4", "reconstruct n/4", "lowrank n/4"]
LAST = 10
"""Steps whose mean loss is the figure."""


def trained(variant: str, asked: argparse.Namespace) -> dict[str, Any]:
    return_freed_blocks(MiB)
    memory = PeakMemory()
    memory.reset()
    before = memory.resident_bytes
    run = train(
        VARIANTS[variant],
        seed=0,
        steps=asked.steps,
        batch=asked.batch,
        sequence=asked.sequence,
        learning_rate=1e-3,
        config=LLAMA_60M,
        windows=asked.batch,
    )
    return {
        "peak_gib": (memory.resident_bytes - before) / 2**30,
        "loss": statistics.fmean(run["curve"][-LAST:]),
        "held_out": run["held_out"],
        "seconds": run["seconds"],
    }


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--steps", type=int, default=30)
    made.add_argument("--batch", type=int, default=4, help="sequences")
    made.add_argument("--sequence", type=int, default=256, help="tokens")
    made.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=TRIED)
    made.add_argument("--one", choices=list(VARIANTS), help=argparse.SUPPRESS)
    asked = made.parse_args()
    torch.set_num_threads(1)
    if asked.one is not None:
        print(json.dumps(trained(asked.one, asked)))
        return
    found: dict[str, dict[str, Any]] = {}
    for variant in asked.variants:
        size = [f"--{name}={getattr(asked, name)}" for name in ("steps", "batch", "sequence")]
        command = [sys.executable, "-m", "benchmarks.compact_pretraining", "--one", variant, *size]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[variant] = json.loads(said.splitlines()[-1])
        print(f"{variant}: {found[variant]}", file=sys.stderr, flush=True)
    settings = {name: getattr(asked, name) for name in ("steps", "batch", "sequence")}
    figures: dict[str, Any] = {"settings": settings, "runs": found}
    if FULL in found:
        full = found[FULL]
        for key in ("peak_gib", "loss", "held_out"):
            figures[f"{key.removesuffix('_gib')}_ratio"] = {
                name: run[key] / full[key] for name, run in found.items() if name != FULL
            }
    finish({**figures, **hardware()}, asked.json)


if __name__ == "__main__":
    main()
