"""Where a step's time goes with offload on: by what the training thread does, and beside it the CPU time of the I/O threads.

    python -m benchmarks.where_time_goes --json --plot docs/images/where_time_goes.png

The GPT of the activation benchmark, steps with and without SSDTrain interleaved. On the training thread the clock is read around
the pack hook, the unpack hook, and inside of them around the submission of operations; waits are the engine's own figures. What
the step takes beyond that and beyond a step without SSDTrain is computation made slower: by I/O threads on the same cores, by
memory bandwidth, and by pages that are new to the process. `slower_on_thread` is the same of the thread's CPU time, which other
processes do not lengthen. Medians of seconds per step.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.activation import KEEP, SSDTRAIN, Trial, warm_up
from benchmarks.common import finish, hardware, huge_pages, page_faults, parser, with_huge_pages
from benchmarks.models import gpt
from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime
from ssdtrain.tools.bench.ratios import paired_ratio

PARTS = {
    "pack": "pack hook",
    "submit_write": "submitting writes",
    "store_wait": "waiting for stores",
    "unpack": "unpack hook",
    "submit_read": "submitting reads",
    "load_wait": "waiting for loads",
    "slower": "computation made slower",
}
"""Parts of what a step takes beyond one without SSDTrain, and their names in the plot."""

COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#66C2A5", "#CC79A7", "#999999")


class Clock:
    """Seconds in a method, of whatever thread calls it; `inner` clocks are taken off."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        plain: Callable[..., Any] = getattr(owner, name)
        lock = threading.Lock()

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                with lock:
                    self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def io_cpu_seconds() -> float:
    """CPU time of the I/O pool's threads since they began."""
    nanoseconds = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("ssdtrain"):
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds * 1e-9


def measure(arguments: Any, directory: Path) -> dict[str, Any]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = gpt(layers=arguments.layers, hidden=arguments.hidden, sequence=arguments.sequence).to(device)
    runtime = Runtime(
        load_config({"offload": {"directories": str(directory), "amount": arguments.amount}}),
        device,
        logs=False,
    )
    engine, store = runtime.engine, runtime.offload.store
    assert engine is not None and store is not None
    clocks = {"pack": Clock(engine, "pack"), "unpack": Clock(engine, "unpack")}
    clocks |= {"submit_write": Clock(store, "write"), "submit_read": Clock(store, "read")}
    trial = Trial(model, arguments.sequence, arguments.batch, runtime)
    warm_up(trial)
    keep: list[float] = []
    ours: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in [*PARTS, "io_cpu", "slower_on_thread"]}
    faults: dict[str, list[int]] = {KEEP: [], SSDTRAIN: []}
    for _ in range(arguments.pairs):
        faulted, began = page_faults(), time.thread_time()
        keep.append(trial.seconds(KEEP))
        kept = time.thread_time() - began
        faults[KEEP].append(page_faults() - faulted)
        before = {name: clock.seconds for name, clock in clocks.items()}
        waits, cpu = engine.snapshot(), io_cpu_seconds()
        faulted, began = page_faults(), time.thread_time()
        ours.append(trial.seconds(SSDTRAIN))
        thread = time.thread_time() - began
        faults[SSDTRAIN].append(page_faults() - faulted)
        spent = {name: clock.seconds - before[name] for name, clock in clocks.items()}
        now = engine.snapshot()
        spent["store_wait"] = now.store_wait_seconds - waits.store_wait_seconds
        spent["load_wait"] = now.load_wait_seconds - waits.load_wait_seconds
        spent["pack"] -= spent["store_wait"] + spent["submit_write"]
        spent["unpack"] -= spent["load_wait"] + spent["submit_read"]
        spent["slower"] = ours[-1] - keep[-1] - sum(spent.values())
        hooks = sum(spent[name] for name in clocks)
        spent["slower_on_thread"] = thread - kept - hooks
        spent["io_cpu"] = io_cpu_seconds() - cpu
        for name, seconds in spent.items():
            parts[name].append(seconds)
    runtime.close()
    figures: dict[str, Any] = {"layers": arguments.layers, "pairs": arguments.pairs}
    figures |= {"step_seconds_keep": statistics.median(keep), "step_seconds": statistics.median(ours)}
    figures["step_time_ratio"] = paired_ratio(ours, keep)
    figures |= {f"{name}_seconds": statistics.median(values) for name, values in parts.items()}
    figures |= {f"page_faults_{way}": statistics.median(values) for way, values in faults.items()}
    return {**figures, **hardware(directory), "torch": torch.__version__, "device": device.type}


def plot(figures: dict[str, Any], path: Path) -> None:
    """One bar of the parts, in milliseconds per step. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(PARTS)
    values = [1e3 * figures[f"{name}_seconds"] for name in names]
    bars = axes.barh([PARTS[name] for name in names], values, color=COLOURS)
    axes.bar_label(bars, fmt="%.1f ms", padding=3)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(x=0.15)
    axes.set_xlabel("milliseconds per step on the training thread (medians)")
    axes.set_title(
        f"{figures['layers']} layers: {figures['step_seconds']:.2f} s a step, {figures['step_seconds_keep']:.2f} s without; "
        f"I/O threads use {figures['io_cpu_seconds'] * 1e3:.0f} ms of CPU"
        f"{', huge pages' if figures['huge_pages'] else ''}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--layers", type=int, default=12, help="blocks")
    arguments.add_argument("--hidden", type=int, default=384, help="width")
    arguments.add_argument("--sequence", type=int, default=512, help="tokens")
    arguments.add_argument("--batch", type=int, default=6, help="sequences")
    arguments.add_argument(
        "--amount", default="all", help='of `offload.amount`: "all", "auto", a fraction, a size'
    )
    arguments.add_argument("--pairs", type=int, default=15, help="steps of each kind, interleaved")
    arguments.add_argument("--plot", type=Path, default=None, help="write a PNG there")
    arguments.add_argument(
        "--directory", type=Path, default=None, help="on the drive to measure; default: temporary"
    )
    huge_pages(arguments)
    chosen = arguments.parse_args()
    with_huge_pages("benchmarks.where_time_goes", chosen.huge_pages)
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as temporary:
        figures = measure(chosen, chosen.directory or Path(temporary))
    if chosen.plot is not None:
        plot(figures, chosen.plot)
    finish(figures, chosen.json)


if __name__ == "__main__":
    main()
