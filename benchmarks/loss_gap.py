"""What compression of collectives costs in held-out loss: paired seeds, each variant against the uncompressed run of its seed.

    python -m benchmarks.loss_gap --json --seeds 5 --steps 500

A variant is a `comm` block and nothing else. Four ranks over loopback, each counted as a node of its own, train a GPT of 0.7 M
parameters on the Python standard library's sources: ZeRO-2 with data parallelism on all four, and a pipeline of two stages with
data parallelism 2. The model is small, so every block gets `min_bytes` 0, `warmup_steps` 20 and no probe: everything is
compressed, nearly from the start. Each finished run is in --results at once; started again, the benchmark goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.common import finish, hardware, parser
from benchmarks.two_nodes.ranks import RankFailed, Ranks

UNCOMPRESSED, HYBRID, NAIVE = "uncompressed", "paper-zhybrid", "naive"
SMALL = {"min_bytes": 0, "warmup_steps": 20, "probe": False}
"""Said in every block, because the model is small and the run is short."""
ONE_LOW_RATE = "zfp:rate=8"
"""The rate that paper-zhybrid has for data parallelism only."""
VARIANTS: dict[str, dict[str, Any] | None] = {
    UNCOMPRESSED: None,
    "safe": {"preset": "safe", **SMALL},
    "balanced": {"preset": "balanced", **SMALL},
    "aggressive": {"preset": "aggressive", **SMALL},
    HYBRID: {"preset": HYBRID, **SMALL},
    NAIVE: {
        **dict.fromkeys(("dp", "dp_gather", "tp", "pp_forward", "pp_backward", "zero_gather"), ONE_LOW_RATE),
        **SMALL,
    },
}
PLAN: dict[str, tuple[str, ...]] = {
    "zero2": (UNCOMPRESSED, "safe", "balanced", "aggressive"),
    "pp2": (UNCOMPRESSED, "balanced", HYBRID, NAIVE),
}
"""Which variants are trained in which layout of `benchmarks.loss_training`."""
WORLD = 4
POINTS = 100
"""Of a loss curve that is kept."""


class Results:
    """The runs so far, in a file that is whole after each of them."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self.settings = settings
        self.runs: list[dict[str, Any]] = []
        if path.is_file():
            found = json.loads(path.read_text())
            if found["settings"] != settings:
                raise SystemExit(
                    f"{path} holds runs of other settings ({found['settings']}, now {settings}): "
                    "give another --results"
                )
            self.runs = found["runs"]

    def find(self, layout: str, variant: str, seed: int) -> dict[str, Any] | None:
        """A run that ended well."""
        for run in self.runs:
            if (run["layout"], run["variant"], run["seed"]) == (layout, variant, seed):
                return run
        return None

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps({"settings": self.settings, "runs": self.runs}))
        os.replace(new, self._path)


def train(layout: str, variant: str, seed: int, steps: int, progress: Progress) -> dict[str, Any]:
    """One run. Raises RankFailed."""
    began = time.perf_counter()
    command = [
        "-m",
        "benchmarks.loss_training",
        "--layout",
        layout,
        "--seed",
        str(seed),
        "--steps",
        str(steps),
    ]
    block = VARIANTS[variant]
    if block is not None:
        command += ["--comm", json.dumps(block)]
    task = progress.add_task(f"{layout} {variant} seed {seed}", total=steps)
    with Ranks(command, WORLD) as ranks:
        about = ranks.tell("about")[0]
        done = 0
        while done < steps:
            count = min(25, steps - done)
            ranks.tell("step", count=count)
            done += count
            progress.update(task, completed=done)
        results = ranks.finish()
    progress.remove_task(task)
    losses = [
        statistics.fmean(values) for values in zip(*(result["losses"] for result in results), strict=True)
    ]
    size = max(1, steps // POINTS)
    replicas: dict[str, set[str]] = {}
    for result in results:
        replicas.setdefault(result["replica"], set()).add(result["sha256"])
    return {
        "layout": layout,
        "variant": variant,
        "seed": seed,
        "held_out": statistics.fmean(result["held_out"] for result in results),
        "curve": [statistics.fmean(losses[at : at + size]) for at in range(0, steps, size)],
        "replicas_equal": all(len(found) == 1 for found in replicas.values()),
        "wire_ratio": _wire_ratio(results),
        "tokens_per_step": about["tokens_per_step"],
        "seconds": time.perf_counter() - began,
    }


def _wire_ratio(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By SSDTrain's own count, for each dimension that sent anything."""
    sent: dict[str, list[float]] = {}
    for result in results:
        for dimension, figures in (result["meter"] or {}).items():
            both = sent.setdefault(dimension, [0.0, 0.0])
            both[0] += figures["wire_bytes"]
            both[1] += figures["raw_bytes"]
    return {dimension: wire / raw for dimension, (wire, raw) in sent.items() if raw}


def student_quantile(probability: float, freedom: int) -> float:
    """Of Student's t distribution, for probabilities above one half: the density is summed up to it."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))

    def density(x: float) -> float:
        return scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    step, x, total = 1e-4, 0.0, 0.5
    while total < probability:
        total += step * density(x + step / 2)
        x += step
    return x


def upper_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """The bound that the mean of paired differences stays under with this confidence (one-sided, Student's t)."""
    if len(values) < 2:
        return math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) + student_quantile(confidence, len(values) - 1) * error


def figures_of(results: Results) -> dict[str, Any]:
    """Gaps by layout and variant, relative to the uncompressed run of the same seed, over the seeds that both have."""
    figures: dict[str, Any] = {
        "loss_gap_upper95": {},
        "loss_gap_mean": {},
        "loss_gap_upper975": {},
        "seeds": {},
        "held_out": {},
    }
    for layout, variant, gaps in _gaps(results):
        name = f"{layout}/{variant}"
        figures["loss_gap_mean"][name] = statistics.fmean(gaps)
        figures["loss_gap_upper95"][name] = upper_bound(gaps)
        figures["loss_gap_upper975"][name] = upper_bound(gaps, 0.975)
        figures["seeds"][name] = len(gaps)
    for layout in PLAN:
        for variant in PLAN[layout]:
            found = [
                run["held_out"]
                for run in results.runs
                if (run["layout"], run["variant"]) == (layout, variant)
            ]
            if found:
                figures["held_out"][f"{layout}/{variant}"] = statistics.fmean(found)
    figures["naive_worse_than_hybrid_standard_errors"] = {
        layout: value
        for layout in PLAN
        if (value := _standard_errors(results, layout, NAIVE, HYBRID)) is not None
    }
    figures["replicas_equal"] = all(run["replicas_equal"] for run in results.runs)
    return figures


def _gaps(results: Results) -> Iterator[tuple[str, str, list[float]]]:
    for layout, variants in PLAN.items():
        for variant in variants:
            gaps = [
                run["held_out"] / plain["held_out"] - 1
                for run in results.runs
                if (run["layout"], run["variant"]) == (layout, variant)
                and (plain := results.find(layout, UNCOMPRESSED, run["seed"])) is not None
            ]
            if gaps and variant != UNCOMPRESSED:
                yield layout, variant, gaps


def _standard_errors(results: Results, layout: str, worse: str, better: str) -> float | None:
    """The mean paired difference of two variants in its own standard errors; None with fewer than two seeds."""
    differences = [
        run["held_out"] - other["held_out"]
        for run in results.runs
        if (run["layout"], run["variant"]) == (layout, worse)
        and (other := results.find(layout, better, run["seed"])) is not None
    ]
    if len(differences) < 2:
        return None
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) / error if error else math.inf


def run(
    *, seeds: int, steps: int, layouts: Sequence[str], variants: Sequence[str], path: Path
) -> dict[str, Any]:
    """Train what is missing, in the order of seeds, so that whatever is there is paired. Arguments as the flags."""
    settings = {"steps": steps, "world": WORLD, "small": SMALL, "one_low_rate": ONE_LOW_RATE}
    results = Results(path, settings)
    wanted = [
        (layout, variant, seed)
        for seed in range(seeds)
        for layout in layouts
        for variant in PLAN[layout]
        if variant in variants
    ]
    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = progress.add_task("runs", total=len(wanted))
        for layout, variant, seed in wanted:
            if results.find(layout, variant, seed) is None and f"{layout}/{variant}" not in failed:
                try:
                    found = train(layout, variant, seed, steps, progress)
                    results.add(found)
                    progress.console.print(
                        f"{layout} {variant} seed {seed}: held-out {found['held_out']:.4f}, {found['seconds']:.0f} s",
                        highlight=False,
                    )
                except RankFailed as error:
                    failed[f"{layout}/{variant}"] = str(error).strip().splitlines()[-1]
                    progress.console.print(str(error), markup=False, highlight=False)
            progress.advance(total)
    return {**figures_of(results), "failed": failed, **settings, "results": str(path)}


def add_arguments(made: argparse.ArgumentParser, prefix: str = "") -> None:
    add = made.add_argument
    add(f"--{prefix}seeds", type=int, default=5, help="paired seeds, from 0 on")
    add(f"--{prefix}steps", type=int, default=500, help="of each run")
    add(f"--{prefix}layouts", nargs="+", choices=list(PLAN), default=list(PLAN))
    add(f"--{prefix}variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    add(f"--{prefix}results", type=Path, default=Path("out/loss_gap.json"), help="finished runs")


def main() -> None:
    made = parser(__doc__ or "")
    add_arguments(made)
    chosen = made.parse_args()
    figures = run(
        seeds=chosen.seeds,
        steps=chosen.steps,
        layouts=chosen.layouts,
        variants=chosen.variants,
        path=chosen.results,
    )
    finish({**figures, **hardware()}, chosen.json)


if __name__ == "__main__":
    main()
