"""One GPT three ways in the same processes, a step of each in turn: keep, recompute, SSDTrain. Then the table and the verdict.

```
python -m examples.megatron_gpt.demo          # starts 4 processes: tensor parallel 2, pipeline parallel 2
torchrun ... -m examples.megatron_gpt.demo --tensor-model-parallel-size 2 ...
```

Memory is that of the rank that has most, bytes are those of all ranks.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rich.console import Console

from examples.megatron_gpt.options import offload_by_default, parser
from examples.megatron_gpt.trainer import Trainer, initialize, training_set
from examples.support.activation_meter import SavedTensorMeter, StepRecord
from examples.support.process_memory import GLIBC_STEADY, PeakMemory, return_freed_blocks
from examples.support.result import RunResult
from examples.support.table import comparison_table
from ssdtrain.config.units import MiB
from ssdtrain.storage import drive_of, rated_bytes
from ssdtrain.telemetry.lines import write_line

__all__ = ["main"]

MODES = ("keep", "recompute", "ssdtrain")
TITLES = {"keep": "keep", "recompute": "recompute", "ssdtrain": "SSDTrain"}
MEMORY_STEPS, WARMUP = 2, 1
EQUAL, DIFFERENT = 0, 1


class Mode:
    """One of the three, on this rank."""

    def __init__(self, name: str, options: argparse.Namespace, dataset: Any) -> None:
        changes: dict[str, Any] = {}
        if name == "recompute":
            changes = {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        self.name = name
        self.trainer = Trainer(options, dataset, **changes)
        self.attachment = self.trainer.attach() if name == "ssdtrain" else None
        self.meter = SavedTensorMeter()
        for model in self.trainer.models:
            self.meter.exclude(model)
        self.memory = PeakMemory()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak = self.resident = 0
        self.before: dict[str, float] = {}
        # Each mode sees the random numbers it would see alone.
        self._random = _random_state()

    def step(self, number: int) -> float:
        """The step `number`, from 0; its seconds."""
        timed = number >= MEMORY_STEPS + WARMUP
        if number == MEMORY_STEPS + WARMUP:
            self.before = self._moved()
        _set_random_state(self._random)
        self.memory.reset()
        began = time.perf_counter()
        with self._measured() as record:
            loss = self.trainer.gradients()
        self.trainer.update()
        seconds = time.perf_counter() - began
        self._random = _random_state()
        self.losses.append(float("nan") if loss is None else loss)
        if 0 < number < MEMORY_STEPS:
            self.resident = max(self.resident, self.memory.resident_bytes)
        if timed:
            self.seconds.append(seconds)
            self.peak = max(self.peak, record.peak_bytes)
        return seconds

    @contextmanager
    def _measured(self) -> Iterator[StepRecord]:
        if self.attachment is None:
            with self.meter.step() as record:
                yield record
            return
        # SSDTrain's hooks are the innermost, so that the other meter would see nothing; both count the same.
        engine = self.attachment.runtime.engine
        assert engine is not None
        self.attachment.runtime.reset_peak()
        record = StepRecord()
        yield record
        found = self.attachment.statistics()
        assert found is not None
        record.timeline = [(0.0, found.offload.activation_peak_bytes)]

    def _moved(self) -> dict[str, float]:
        found = self.attachment.statistics() if self.attachment is not None else None
        if found is None:
            return {}
        return {
            "bytes_written": found.store.ssd_bytes_written,
            "bytes_read": found.store.ssd_bytes_read,
            "bytes_cancelled": found.offload.avoided_write_bytes,
            "stall_seconds": found.offload.stall_seconds,
        }

    def result(self) -> RunResult:
        """The figures of all ranks. A collective."""
        moved = {name: value - self.before[name] for name, value in self._moved().items()}
        mine = {
            "losses": self.losses,
            "digest": self.trainer.digest(),
            "seconds": self.seconds,
            "peak": self.peak,
            "resident": self.resident,
            "moved": moved,
            "parameters": self.trainer.parameters(),
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        sums = {name: sum(rank["moved"][name] for rank in ranks) for name in moved if name != "stall_seconds"}
        if moved:
            sums["stall_seconds"] = max(rank["moved"]["stall_seconds"] for rank in ranks)
        return RunResult(
            name=self.name,
            losses=[loss.hex() for loss in ranks[-1]["losses"]],
            weights_sha256=" ".join(rank["digest"] for rank in ranks),
            step_seconds=[max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)],
            activation_peak_bytes=max(rank["peak"] for rank in ranks),
            activation_timeline=[],
            backward_began=None,
            resident_peak_bytes=max(rank["resident"] for rank in ranks),
            resident_peak_covers=self.memory.covers,
            about={
                "activation_peak_bytes_by_rank": [rank["peak"] for rank in ranks],
                "parameters": sum(rank["parameters"] for rank in ranks),
                "options": {
                    key: str(value) for key, value in vars(self.trainer.options).items() if value is not None
                },
            },
            **sums,
        )


def _random_state() -> tuple[Any, ...]:
    from ssdtrain_megatron._compat import random_tracker

    device = torch.cuda.get_rng_state()
    return torch.get_rng_state(), device, dict(random_tracker().get_states())


def _set_random_state(state: tuple[Any, ...]) -> None:
    from ssdtrain_megatron._compat import random_tracker

    torch.set_rng_state(state[0])
    torch.cuda.set_rng_state(state[1])
    random_tracker().set_states(dict(state[2]))


def train(options: argparse.Namespace, console: Console) -> list[RunResult]:
    """All modes, a step of each in turn. A collective."""
    return_freed_blocks(MiB)
    dataset = training_set(options)
    modes = [Mode(name, options, dataset) for name in MODES]
    for number in range(options.train_iters):
        if number == MEMORY_STEPS:
            return_freed_blocks(GLIBC_STEADY)
        for mode in modes:
            seconds = mode.step(number)
            if number in (0, options.train_iters - 1) or (number + 1) % options.log_interval == 0:
                line = f"step {number + 1:>3} of {options.train_iters}  {TITLES[mode.name]:<10}"
                console.print(f"{line} loss {mode.losses[-1]:.4f}, {1e3 * seconds:.0f} ms", highlight=False)
    gc.collect()
    results = [mode.result() for mode in modes]
    for mode in modes:
        if mode.attachment is not None:
            mode.attachment.close()
    return results


def show(runs: list[RunResult], options: argparse.Namespace, out: Path, console: Console) -> int:
    """The table, the results' file and the verdict; the exit status."""
    about = runs[0].about
    shape = (
        f"{options.num_layers} layers, hidden {options.hidden_size}, sequence {options.seq_length}, "
        f"{options.global_batch_size // options.micro_batch_size} microbatches of {options.micro_batch_size}"
    )
    console.print(
        f"GPT, {about['parameters'] / 1e6:.1f} M parameters: {shape}; tensor parallel {options.tensor_model_parallel_size}, "
        f"pipeline parallel {options.pipeline_model_parallel_size} on {dist.get_world_size()} processes; "
        f"megatron-core {megatron.core.__version__}, torch {torch.__version__}",
        highlight=False,
    )
    rated = rated_bytes(drive_of(out).size)
    console.print(comparison_table(runs, rated_bytes=rated, titles=TITLES))
    for run in runs:
        peaks = ", ".join(f"{peak / MiB:.1f}" for peak in run.about["activation_peak_bytes_by_rank"])
        console.print(f"activation peak by rank, MiB, {TITLES[run.name]}: {peaks}", highlight=False)
    with (out / "results.jsonl").open("w") as stream:
        for run in runs:
            write_line(stream, run.to_json())
    status = EQUAL
    for run in runs[1:]:
        difference = run.differs_from(runs[0])
        if difference is not None:
            console.print(f"NOT EQUAL: {difference}", style="bold red", highlight=False)
            status = DIFFERENT
        else:
            console.print(
                f"{TITLES[run.name]} and keep: all {len(run.losses)} losses and the weights of all ranks are equal to the bit.",
                style="green",
                highlight=False,
            )
    ratio = statistics.median(
        mine / base for mine, base in zip(runs[-1].step_seconds, runs[0].step_seconds, strict=True)
    )
    console.print(f"step time, SSDTrain against keep, median of the pairs: x{ratio:.2f}", highlight=False)
    return status


def main(arguments: list[str] | None = None) -> int:
    """Train and compare on the ranks that a launcher started; 1 if any bit differs."""
    made = parser("python -m examples.megatron_gpt.demo")
    made.add_argument("--out", type=Path, default=Path("out/demo-megatron"))
    options = made.parse_args(arguments)
    if options.train_iters <= MEMORY_STEPS + WARMUP:
        made.error(
            f"--train-iters {options.train_iters} leaves none to time: give {MEMORY_STEPS + WARMUP + 1} or more"
        )
    logging.getLogger("megatron").setLevel(logging.ERROR)
    initialize(options)
    options.out.mkdir(parents=True, exist_ok=True)
    offload_by_default(options, options.out / "ssd")
    # The last rank has the losses.
    last = dist.get_rank() == dist.get_world_size() - 1
    console = Console(quiet=not last, width=120)
    runs = train(options, console)
    status = show(runs, options, options.out, console) if last else EQUAL
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
