"""What compressed inputs of linear layers save, what they cost in time, and what they cost in held-out loss.

    python -m benchmarks.compact --json

Three parts, of which each can be left out. `--loss`: a Llama-like model of 0.5 M parameters is trained for 1,000 steps on the
Python standard library's sources with paired seeds, each variant against the uncompressed run of its seed; finished runs are
in --results at once, and the benchmark goes on from there. `--memory`: bytes that are alive after the forward of one block, and
the bytes of LLaMA geometries. `--time`: a training step with and without, in turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ssdtrain
from benchmarks.common import finish, hardware, parser
from benchmarks.compact_memory import activation_ratios, peaks
from benchmarks.compact_training import BATCH, SEQUENCE, Llama, LlamaConfig, train
from benchmarks.loss_gap import Results, upper_bound
from ssdtrain.bench.ratios import interval

FULL = "full"
LAYOUT = "llama"
VARIANTS: dict[str, dict[str, Any] | None] = {
    FULL: None,
    "quant int4": {"mode": "quant", "codec": "int4"},
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
    """Train what is missing. Returns loss_gap and loss_gap_upper95 by variant, relative to the uncompressed loss."""
    results = Results(
        path, {"steps": steps, "batch": BATCH, "sequence": SEQUENCE, "schedule": "cosine to zero"}
    )
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
    figures: dict[str, Any] = {"loss_gap": {}, "loss_gap_upper95": {}, "loss_seeds": {}, "held_out": {}}
    for name in VARIANTS:
        runs = [run for run in results.runs if run["variant"] == name]
        pairs = [(run, results.find(LAYOUT, FULL, run["seed"])) for run in runs]
        gaps = [run["held_out"] / plain["held_out"] - 1 for run, plain in pairs if plain is not None]
        if not runs:
            continue
        figures["held_out"][name] = statistics.fmean(run["held_out"] for run in runs)
        if name != FULL and gaps:
            figures["loss_gap"][name] = statistics.fmean(gaps)
            figures["loss_gap_upper95"][name] = upper_bound(gaps)
            figures["loss_seeds"][name] = len(gaps)
    plain = [run["held_out"] for run in results.runs if run["variant"] == FULL]
    figures["settings"] = results.settings
    figures["runs"] = [{key: run[key] for key in ("variant", "seed", "held_out")} for run in results.runs]
    if len(plain) > 1:
        figures["seed_noise"] = statistics.stdev(plain) / statistics.fmean(plain)
    return figures


def step_times(pairs: int) -> dict[str, Any]:
    """step_time_ratio: the median of steps with over steps without, in turns, forward and backward of a wider model."""
    config = LlamaConfig(layers=2, hidden=512, heads=8, middle=1376)
    torch.manual_seed(0)
    plain = Llama(config)
    tokens = torch.randint(256, (2, 257))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    times: dict[str, list[float]] = {}
    chosen = {
        "reconstruct n/4": {"ratio": 0.25},
        "reconstruct n/4, hadamard": {"ratio": 0.25, "projection": "hadamard"},
        "quant int4": {"mode": "quant"},
        "lowrank n/4": {"mode": "lowrank", "ratio": 0.25},
    }
    optimizer = torch.optim.SGD(plain.parameters())
    for name, section in chosen.items():
        for _ in range(pairs + 1):
            began = time.perf_counter()
            plain(*batch).backward()
            plain.zero_grad()
            middle = time.perf_counter()
            # Attached anew for each pair, outside of the time.
            runtime = ssdtrain.attach(
                plain, {"compact": section, "report": {"interval": 0}}, optimizer=optimizer
            )
            plain(*batch).backward()
            plain.zero_grad()
            third = time.perf_counter()
            plain(*batch).backward()
            plain.zero_grad()
            ended = time.perf_counter()
            runtime.step_end()
            runtime.close()
            times.setdefault(name, []).append((ended - third) / (middle - began))
    return {
        "step_time_ratio": {name: statistics.median(found[1:]) for name, found in times.items()},
        "step_time_interval": {name: interval(found[1:]) for name, found in times.items()},
    }


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument(
        "--parts", nargs="+", choices=("memory", "time", "loss"), default=["memory", "time", "loss"]
    )
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
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
        # Bytes depend on the ratio only, and widths of LLaMA are no multiples of a power of two.
        sections = {name: section for name, section in VARIANTS.items() if "hadamard" not in name}
        figures["activation_ratio"] = activation_ratios(sections)
        figures |= peaks(sections)
    if "time" in chosen.parts:
        figures |= step_times(chosen.pairs)
    finish({**figures, **hardware()}, chosen.json)


if __name__ == "__main__":
    main()
