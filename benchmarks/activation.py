"""What offloading a GPT's activations saves and costs: memory, time, and equality to the bit, in one process.

    python -m benchmarks.activation --json --model gpt --layers 12

Three ways to run the same step of the same model, interleaved: keeping activations, SSDTrain, and recomputing the fewest
blocks whose measured peak is no more than SSDTrain's. A step is forward, backward and AdamW.

How activation memory is measured: bytes that are alive for backward. For keeping and recomputing, by a meter that owes nothing
to the engine (`examples.support.activation_meter`): every storage that reached a saved-tensor hook, once, whole, from its save to
its death, parameters and buffers left out. For SSDTrain by the engine: the same storages, plus the whole arena of buffers,
plus loads outside of it. It is confirmed by the process: the peak of the resident set during the step minus that before it
(VmHWM, reset through /proc/self/clear_refs), with glibc told to hand freed blocks back, in a process of its own; on a GPU by
torch.cuda's peak. Steps are timed with malloc as it is. `cpu_time_ratio` is of the CPU seconds of all threads: with
OMP_NUM_THREADS=1 it says what hooks and I/O take, wherever it runs; with more, OpenMP's threads that spin are in it.
`beside_ratio`, with --beside, is of the step that keeps while another process writes and reads as many bytes as SSDTrain moves
(`benchmarks.beside`): what moving them costs on this machine whoever does it, and so the least that a step time ratio can be.
`training_thread_ratio` is of the CPU seconds of the thread that trains and of the seconds in which it waited for stores and
loads: with OMP_NUM_THREADS=1 and a core left for I/O it is a step time that other processes of the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.beside import Mover
from benchmarks.common import finish, hardware, huge_pages, page_faults, parser, with_huge_pages
from benchmarks.models import DTYPES, MODELS
from examples.support.activation_meter import SavedTensorMeter
from examples.support.process_memory import PeakMemory, return_freed_blocks
from ssdtrain.config import load_config, parse_size
from ssdtrain.config.units import MiB
from ssdtrain.runtime import Runtime
from ssdtrain.tools.bench.ratios import interval, paired_ratio

KEEP, SSDTRAIN, RECOMPUTE, BESIDE = "keep", "ssdtrain", "recompute", "beside"


class Trial:
    """One model, its optimizer and one batch; a step in any of the three ways.

    Args:
        model: called with (tokens, targets), it returns the loss.
        sequence, batch, vocabulary: of the tokens, int64 (batch, sequence) below `vocabulary`.
        runtime: SSDTrain's.
    """

    def __init__(
        self, model: torch.nn.Module, sequence: int, batch: int, vocabulary: int, runtime: Runtime
    ) -> None:
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(1)
        self.model = model
        self.runtime = runtime
        self.tokens, self.targets = (
            torch.randint(vocabulary, (batch, sequence), generator=generator).to(device) for _ in range(2)
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.meter = SavedTensorMeter(model)
        self.memory = PeakMemory()
        self.recomputed = 0
        runtime.register(model)

    def loss_and_backward(self, way: str) -> torch.Tensor:
        self.model.recomputed_blocks = self.recomputed if way == RECOMPUTE else 0  # type: ignore[assignment]
        self.optimizer.zero_grad(set_to_none=False)
        if way != SSDTRAIN:
            loss = self.model(self.tokens, self.targets)
            loss.backward()
            return loss.detach()
        with self.runtime.step():
            with self.runtime.forward():
                loss = self.model(self.tokens, self.targets)
            with self.runtime.backward():
                loss.backward()
        return loss.detach()

    def seconds(self, way: str) -> float:
        began = time.perf_counter()
        self.loss_and_backward(way)
        self.optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def stall_seconds(self) -> float:
        found = self.runtime.statistics()
        assert found is not None
        return found.offload.stall_seconds

    def gradients(self, way: str) -> list[torch.Tensor]:
        loss = self.loss_and_backward(way)
        return [loss, *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]

    def activation_peak(self, way: str) -> int:
        """Bytes alive for backward at most, during one step."""
        if way == SSDTRAIN:
            self.runtime.reset_peak()
            self.loss_and_backward(way)
            found = self.runtime.statistics()
            assert found is not None
            return found.offload.activation_peak_bytes
        with self.meter.step() as record:
            self.loss_and_backward(way)
        return record.peak_bytes

    def process_peak(self, way: str) -> int:
        """Bytes by which the step raised the process's resident set, or on a GPU torch's allocator, at most.

        The arena lives on between steps, so what was ever used of it is in the process before the step too: it is added.
        """
        gc.collect()
        self.memory.reset()
        before = self.memory.device_bytes if torch.cuda.is_available() else self.memory.resident_bytes
        self.loss_and_backward(way)
        after = self.memory.device_bytes if torch.cuda.is_available() else self.memory.resident_bytes
        assert before is not None and after is not None
        held = 0
        if way == SSDTRAIN and self.runtime.engine is not None and self.runtime.engine.device.kind == "cpu":
            held = self.runtime.engine.buffers.peak
        return after - before + held


def fewest_blocks(trial: Trial, peak: int, layers: int) -> tuple[int, int]:
    """The smallest number of recomputed blocks whose measured peak is at most `peak`, and that peak. All, if none reaches it."""
    low, high = 0, layers
    found: dict[int, int] = {}

    def measured(blocks: int) -> int:
        trial.recomputed = blocks
        return found.setdefault(blocks, trial.activation_peak(RECOMPUTE))

    while low < high:
        middle = (low + high) // 2
        if measured(middle) <= peak:
            high = middle
        else:
            low = middle + 1
    return high, measured(high)


def median_of(count: int, measure: Callable[[], int]) -> int:
    return int(statistics.median(measure() for _ in range(count)))


def make(arguments: Any, directory: Path) -> Trial:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = MODELS[arguments.model](
        layers=arguments.layers,
        hidden=arguments.hidden,
        sequence=arguments.sequence,
        vocabulary=arguments.vocabulary,
    )
    offload: dict[str, Any] = {"directories": str(directory), "amount": arguments.amount}
    for key in ("in_flight", "buffer", "prefetch"):
        if getattr(arguments, key) is not None:
            offload[key] = getattr(arguments, key)
    report = {"interval": 0 if arguments.process_peaks else 100}
    runtime = Runtime(load_config({"offload": offload, "report": report}), device, logs=False)
    model = model.to(device, DTYPES[arguments.dtype])
    return Trial(model, arguments.sequence, arguments.batch, arguments.vocabulary, runtime)


def warm_up(trial: Trial) -> None:
    auto = trial.runtime.config.offload is not None and trial.runtime.config.offload.amount.kind == "auto"
    for way in (KEEP, SSDTRAIN) * (6 if auto else 2):
        trial.gradients(way)  # the second SSDTrain step has its arena from the start; "auto" plans after some


def process_peaks(arguments: Any, directory: Path) -> dict[str, int]:
    """The process's peaks by way. For a process of its own: it changes what malloc gives back, and with it the time of a step."""
    return_freed_blocks(MiB)
    trial = make(arguments, directory)
    warm_up(trial)
    peaks = {way: median_of(3, lambda way=way: trial.process_peak(way)) for way in (KEEP, SSDTRAIN)}  # type: ignore[misc]
    trial.runtime.close()
    return peaks


def in_another_process(directory: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.activation", *sys.argv[1:]]
    command += ["--process-peaks", "--directory", str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(arguments: Any, directory: Path) -> dict[str, Any]:
    resident = in_another_process(directory)
    trial = make(arguments, directory)
    model, runtime = trial.model, trial.runtime
    warm_up(trial)
    kept, offloaded = trial.gradients(KEEP), trial.gradients(SSDTRAIN)
    peaks = {way: median_of(3, lambda way=way: trial.activation_peak(way)) for way in (KEEP, SSDTRAIN)}  # type: ignore[misc]
    trial.recomputed, recompute_peak = fewest_blocks(trial, peaks[SSDTRAIN], arguments.layers)
    mover = Mover(directory) if arguments.beside else None
    ways = [KEEP, SSDTRAIN, RECOMPUTE] + ([BESIDE] if mover is not None else [])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu_seconds: dict[str, list[float]] = {way: [] for way in seconds}
    thread_seconds: dict[str, list[float]] = {way: [] for way in seconds}
    faults: dict[str, list[int]] = {way: [] for way in seconds}
    before = runtime.statistics()
    for way in seconds:
        step = trial.seconds(way)
    after = runtime.statistics()
    assert before is not None and after is not None
    of_a_step = after.store.ssd_bytes_written - before.store.ssd_bytes_written
    before = after
    for pair in range(arguments.pairs):
        # Every way follows every other equally often.
        first = pair % len(ways)
        for way in ways[first:] + ways[:first]:
            waited = trial.stall_seconds()
            beside = mover.moves(of_a_step, step) if mover is not None and way == BESIDE else nullcontext()
            with beside:
                faulted, cpu_began, thread_began = page_faults(), time.process_time(), time.thread_time()
                seconds[way].append(trial.seconds(way))
                cpu_seconds[way].append(time.process_time() - cpu_began)
                thread_seconds[way].append(time.thread_time() - thread_began + trial.stall_seconds() - waited)
                faults[way].append(page_faults() - faulted)
        print(f"\rpair {pair + 1} of {arguments.pairs}", end="", flush=True)
    print()
    after = runtime.statistics()
    assert after is not None
    moved = (after.store.ssd_bytes_written - before.store.ssd_bytes_written) / arguments.pairs
    stalls = (after.offload.stall_seconds - before.offload.stall_seconds) / arguments.pairs
    ratios = [ours / theirs for ours, theirs in zip(seconds[SSDTRAIN], seconds[KEEP], strict=True)]
    low, high = interval(ratios)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = arguments.batch * arguments.sequence
    flops = 6 * parameters * tokens + 6 * arguments.layers * arguments.hidden * tokens * arguments.sequence
    figures = {
        "model": arguments.model,
        "layers": arguments.layers,
        "hidden": arguments.hidden,
        "sequence": arguments.sequence,
        "batch": arguments.batch,
        "vocabulary": arguments.vocabulary,
        "dtype": arguments.dtype,
        "amount": arguments.amount,
        "parameters": parameters,
        "pairs": arguments.pairs,
        "loss_equal": bool(torch.equal(kept[0], offloaded[0])),
        "grads_equal": all(torch.equal(a, b) for a, b in zip(kept, offloaded, strict=True)),
        "activation_peak_keep_mib": peaks[KEEP] / MiB,
        "activation_peak_mib": peaks[SSDTRAIN] / MiB,
        "activation_peak_ratio": peaks[SSDTRAIN] / peaks[KEEP],
        "rss_peak_keep_mib": resident[KEEP] / MiB,
        "rss_peak_mib": resident[SSDTRAIN] / MiB,
        "rss_peak_ratio": resident[SSDTRAIN] / resident[KEEP],
        "step_seconds_keep": statistics.median(seconds[KEEP]),
        "step_time_ratio": paired_ratio(seconds[SSDTRAIN], seconds[KEEP]),
        "step_time_ratio_low": low,
        "step_time_ratio_high": high,
        "cpu_time_ratio": paired_ratio(cpu_seconds[SSDTRAIN], cpu_seconds[KEEP]),
        "training_thread_ratio": paired_ratio(thread_seconds[SSDTRAIN], thread_seconds[KEEP]),
        "recomputed_blocks": trial.recomputed,
        **beside_figures(seconds, thread_seconds),
        "recompute_peak_ratio": recompute_peak / peaks[KEEP],
        "recompute_step_time_ratio": paired_ratio(seconds[SSDTRAIN], seconds[RECOMPUTE]),
        "ssd_bytes_per_step": moved,
        "stall_seconds_per_step": stalls,
        "bytes_per_flop": moved / flops,
        **{f"page_faults_{way}": statistics.median(counts) for way, counts in faults.items()},
        "buffer_mib": runtime.engine.buffers.capacity / MiB if runtime.engine is not None else 0,
        **hardware(directory),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    runtime.close()
    if mover is not None:
        mover.close()
    return figures


def beside_figures(
    seconds: dict[str, list[float]], thread_seconds: dict[str, list[float]]
) -> dict[str, float]:
    if BESIDE not in seconds:
        return {}
    return {
        "beside_ratio": paired_ratio(seconds[BESIDE], seconds[KEEP]),
        "beside_thread_ratio": paired_ratio(thread_seconds[BESIDE], thread_seconds[KEEP]),
        "over_beside_ratio": paired_ratio(seconds[SSDTRAIN], seconds[BESIDE]),
        "thread_over_beside_ratio": paired_ratio(thread_seconds[SSDTRAIN], thread_seconds[BESIDE]),
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", choices=sorted(MODELS), default="gpt", help="what to train")
    arguments.add_argument("--layers", type=int, default=12, help="blocks")
    arguments.add_argument("--hidden", type=int, default=384, help="width")
    arguments.add_argument("--sequence", type=int, default=512, help="tokens")
    arguments.add_argument("--batch", type=int, default=6, help="sequences")
    arguments.add_argument("--vocabulary", type=int, default=256, help="tokens that there are")
    arguments.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of the parameters")
    arguments.add_argument(
        "--amount", default="auto", help='of `offload.amount`: "all", "auto", a fraction, a size that stays'
    )
    arguments.add_argument(
        "--pairs", type=int, default=30, help="interleaved rounds; at least 30 for a figure to report"
    )
    arguments.add_argument(
        "--directory", type=Path, default=None, help="on the drive to measure; default: temporary"
    )
    arguments.add_argument(
        "--in-flight",
        type=lambda text: None if text == "default" else parse_size(text),
        default=48 * MiB,
        help='bytes of stores in flight; "default": the engine\'s choice',
    )
    arguments.add_argument(
        "--buffer", type=parse_size, default=None, help="bytes of the arena; default: the engine's choice"
    )
    arguments.add_argument(
        "--prefetch", type=parse_size, default=None, help="bytes ahead; default: the engine's choice"
    )
    arguments.add_argument(
        "--beside",
        action="store_true",
        help="also a step that keeps, while another process moves as many bytes",
    )
    arguments.add_argument("--process-peaks", action="store_true", help=argparse.SUPPRESS)
    huge_pages(arguments)
    chosen = arguments.parse_args()
    with_huge_pages("benchmarks.activation", chosen.huge_pages)
    if chosen.process_peaks:
        print(json.dumps(process_peaks(chosen, chosen.directory)))
        return
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as temporary:
        finish(run(chosen, chosen.directory or Path(temporary)), chosen.json)


if __name__ == "__main__":
    main()
