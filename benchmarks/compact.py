"""What compressed inputs of linear layers save, what they cost in time, and what they cost in held-out loss.

    python -m benchmarks.compact --json

Three parts, of which `--parts` chooses some. loss: a Llama-like model of 0.14 M parameters is trained for 1,000 steps on the
Python standard library's sources with paired seeds, each variant against the uncompressed run of its seed; finished runs are
in --results at once, and the benchmark goes on from there. memory: bytes that are alive after the forward of one block, and
the bytes of LLaMA geometries. time: a training step with and without, in turns.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ssdtrain
from benchmarks.common import finish, hardware, parser
from benchmarks.compact_memory import activation_ratios, peaks
from benchmarks.compact_training import BATCH, LATE_CHECKPOINTS, SEQUENCE, TRAINED, Llama, LlamaConfig, train
from benchmarks.loss_gap import Results, upper_bound
from ssdtrain.compact.layers import QUANTISERS
from ssdtrain.tools.bench.ratios import interval

FULL = "full"
LAYOUT = "llama"
VARIANTS: dict[str, dict[str, Any] | None] = {
    FULL: None,
    "quant int4": {"mode": "quant", "codec": "int4"},
    "quant int4_rotated": {"mode": "quant", "codec": "int4_rotated"},
    "reconstruct n/4": {"ratio": 0.25},
    "reconstruct n/2": {"ratio": 0.5},
    "reconstruct n/8": {"ratio": 0.125},
    "quant int8": {"mode": "quant", "codec": "int8"},
    "quant int2": {"mode": "quant", "codec": "int2"},
    "reconstruct n/4, hadamard": {"ratio": 0.25, "projection": "hadamard"},
    "lowrank n/4": {"mode": "lowrank", "ratio": 0.25},
    "lowrank n/8": {"mode": "lowrank", "ratio": 0.125},
}
"""By name, the `compact` section; in the order in which they are trained."""


def losses(seeds: list[int], steps: int, variants: list[str], path: Path) -> dict[str, Any]:
    """Train what is missing. Returns what `loss_figures` does: gaps by variant, relative to the uncompressed loss."""
    settings = {
        "steps": steps,
        "hidden": TRAINED.hidden,
        "batch": BATCH,
        "sequence": SEQUENCE,
        "schedule": "cosine to zero",
        "late_checkpoints": LATE_CHECKPOINTS,
        "int4": QUANTISERS["int4"],
        "int4_rotated": QUANTISERS["int4_rotated"],
    }
    results = Results(path, settings)
    for seed in seeds:
        for name in variants:
            if results.find(LAYOUT, name, seed) is None:
                run = train(VARIANTS[name], seed=seed, steps=steps)
                results.add({"layout": LAYOUT, "variant": name, "seed": seed, **run})
                print(
                    f"{name} seed {seed}: {run['held_out']:.4f}, {run['seconds']:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return loss_figures(results)


def loss_figures(results: Results) -> dict[str, Any]:
    """Gaps relative to the uncompressed run of the same seed, over the seeds that both have.

    `loss_gap` compares the last weights, `loss_gap_late` the means of the late checkpoints. Bounds: see `upper_bound`.
    """
    figures: dict[str, Any] = {
        key: {}
        for key in (
            "loss_gap",
            "loss_gap_upper95",
            "loss_gap_late",
            "loss_gap_late_upper95",
            "loss_seeds",
            "held_out",
        )
    }
    for name in VARIANTS:
        runs = [run for run in results.runs if run["variant"] == name]
        pairs = [(run, results.find(LAYOUT, FULL, run["seed"])) for run in runs]
        if not runs:
            continue
        figures["held_out"][name] = statistics.fmean(run["held_out"] for run in runs)
        for key, loss in (("loss_gap", _final_loss), ("loss_gap_late", _late_loss)):
            gaps = [loss(run) / loss(plain) - 1 for run, plain in pairs if plain is not None]
            if name != FULL and gaps:
                figures[key][name] = statistics.fmean(gaps)
                figures[f"{key}_upper95"][name] = upper_bound(gaps)
                figures["loss_seeds"][name] = len(gaps)
    plain = [run["held_out"] for run in results.runs if run["variant"] == FULL]
    figures["settings"] = results.settings
    figures["runs"] = [
        {"variant": run["variant"], "seed": run["seed"], "held_out": run["held_out"], "late": _late_loss(run)}
        for run in results.runs
    ]
    if len(plain) > 1:
        figures["seed_noise"] = statistics.stdev(plain) / statistics.fmean(plain)
    return figures


def _late_loss(run: dict[str, Any]) -> float:
    return statistics.fmean(run["late"])


def _final_loss(run: dict[str, Any]) -> float:
    return float(run["held_out"])


TIMED: dict[str, dict[str, Any]] = {
    "reconstruct n/4, hadamard": {"ratio": 0.25, "projection": "hadamard"},
    "reconstruct n/4": {"ratio": 0.25},
    "quant int4": {"mode": "quant"},
    "quant int4_rotated": {"mode": "quant", "codec": "int4_rotated"},
    "lowrank n/4": {"mode": "lowrank", "ratio": 0.25},
}


def step_times(pairs: int) -> dict[str, Any]:
    """step_time_ratio: the median over pairs of a step with and one without, each in turn.

    Timed are the forward and the backward of a wider model and, with compression, `step_end`; no optimizer. Projections are made
    for 16 steps at once: that is in one of 16 pairs, and so not in the median.
    """
    torch.manual_seed(0)
    plain = Llama(LlamaConfig(layers=2, hidden=512, heads=8, middle=1376))
    tokens = torch.randint(256, (2, 257))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    figures: dict[str, Any] = {"step_time_ratio": {}, "step_time_interval": {}}
    for name, section in TIMED.items():
        compressed = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(compressed.parameters())
        runtime = ssdtrain.attach(
            compressed, {"compact": section, "report": {"interval": 0}}, optimizer=optimizer
        )
        ratios = []
        for _ in range(pairs + 1):
            without = _step_seconds(plain, batch, lambda: None)
            ratios.append(_step_seconds(compressed, batch, runtime.step_end) / without)
        runtime.close()
        figures["step_time_ratio"][name] = statistics.median(ratios[1:])
        figures["step_time_interval"][name] = interval(ratios[1:])
    return figures


def _step_seconds(model: Llama, batch: tuple[Tensor, Tensor], end: Callable[[], object]) -> float:
    began = time.perf_counter()
    model(*batch).backward()
    end()
    seconds = time.perf_counter() - began
    model.zero_grad()
    return seconds


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument(
        "--parts", nargs="+", choices=("memory", "time", "loss"), default=["memory", "time", "loss"]
    )
    made.add_argument("--seeds", type=int, nargs="+", default=list(range(16)))
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    made.add_argument("--results", type=Path, default=Path("out/compact.json"), help="finished runs")
    made.add_argument("--pairs", type=int, default=30, help="of steps with and without")
    chosen = made.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    if "loss" in chosen.parts:
        variants = list(dict.fromkeys([FULL, *chosen.variants]))
        figures |= losses(chosen.seeds, chosen.steps, variants, chosen.results)
    if "memory" in chosen.parts:
        # Bytes depend on the ratio and the bits only, and widths of LLaMA are no multiples of a power of two.
        sections = {
            name: section
            for name, section in VARIANTS.items()
            if "hadamard" not in name and "rotated" not in name
        }
        figures["activation_ratio"] = activation_ratios(sections, torch.float32)
        figures["activation_ratio_bfloat16"] = activation_ratios(sections, torch.bfloat16)
        figures |= peaks(sections)
    if "time" in chosen.parts:
        figures |= step_times(chosen.pairs)
    finish({**figures, **hardware()}, chosen.json)


if __name__ == "__main__":
    main()
