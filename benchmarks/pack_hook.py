"""What the pack hook costs the thread that trains, beside torch's own `save_on_cpu`.

    python -m benchmarks.pack_hook --json

Each round calls the hooks directly, in turn, with fresh tensors of the same size: one that is refused (a parameter), one that is
too small, one that is offloaded (and begins the store of the one before), one that joins the region of another, and the same
tensor given to `save_on_cpu`, which on a CPU keeps it as it is. Between rounds the stores end, so that no call waits for the
drive; what a store costs its I/O threads is not counted here. Figures are medians in microseconds, with the quarters around them.

Beside the times stands how much Python these calls run (`..._opcodes`, `..._calls` of functions), which the load of the machine
does not change: of a save that is offloaded with the start and the end of its store, and of its use in backward (`used`) with the
load, the release and the reuse of the slot. All I/O ends between two calls.

With `--device cuda`: see `benchmarks.pack_hook_cuda`.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import finish, hardware, parser
from benchmarks.opcodes import PythonCost
from benchmarks.pack_hook_cuda import Chain, measure_cuda
from ssdtrain.config import load_config, parse_size
from ssdtrain.config.units import MiB
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.runtime import Runtime

GOALS = {"refused": 20.0, "offloaded": 60.0}
"""Microseconds, at most."""


def on_device() -> dict[str, float]:
    """Measure the host tier beside torchtune's hooks on the CUDA device: ratios of CPU time, and CUDA calls, per saved tensor."""
    peers = ("torchtune", "torchtune_stand_in")  # the stand-in where torchtune cannot be had
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        figures = measure_cuda(Chain(MiB, 128), 15, Path(directory), (*peers, "ssdtrain_host"))
    peer = next(peer for peer in peers if f"ssdtrain_host_pack_over_{peer}" in figures)
    return {
        "pack_us_over_best_peer": figures[f"ssdtrain_host_pack_over_{peer}"],
        "unpack_us_over_best_peer": figures[f"ssdtrain_host_unpack_over_{peer}"],
        "cuda_calls_per_tensor": figures["ssdtrain_host_cuda_calls"],
    }


def settle(runtime: Runtime) -> None:
    """Wait for the stores in flight."""
    while runtime.statistics().offload.in_flight_bytes:  # type: ignore[union-attr]
        time.sleep(0.0005)


def make_runtime(size: int, directory: Path) -> Runtime:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    # An arena with room to spare: where malloc puts tensors decides how many pages each buffer takes.
    section = {"directories": str(directory), "amount": "all", "in_flight": 64 * size, "buffer": 64 * size}
    return Runtime(load_config({"offload": section}), device, logs=False)


def keep_freed_memory() -> None:
    """Have malloc keep the memory of freed tensors for the next ones.

    glibc gives the end of its heap back to the system once that is free and twice as large as the largest block that was ever
    mapped by itself and freed, 32 MiB at most. Without such a block some processes do so in each round and others never, as their
    heaps happen to lie; where it happens the kernel clears each new tensor, and the hooks after it run a tenth to a fifth longer.
    """
    torch.empty(31 * MiB, dtype=torch.uint8, device="cpu")


def next_operator(parameter: torch.Tensor) -> None:
    """What was saved before is stored by the next call that saves: autograd numbers its operators."""
    parameter[:1].neg()


COUNTED = 32
"""Tensors over which the Python of a call is averaged."""


KINDS = ("refused", "small", "kept", "offloaded", "joined", "used")


def python_costs(size: int, directory: Path) -> dict[str, PythonCost]:
    """What the hooks run for `COUNTED` tensors of `size` bytes, by kind of call."""
    runtime = make_runtime(size, directory)
    gc.disable()  # else it runs wherever it happens to
    try:
        # Buffers grow in the first, and Python 3.13 counts what a function runs from its second call on.
        return [_count(runtime, size) for _ in range(3)][-1]
    finally:
        gc.enable()
        runtime.close()


def _count(runtime: Runtime, size: int) -> dict[str, PythonCost]:
    engine = runtime.engine
    assert engine is not None
    device = engine.eligible.device
    parameter = torch.nn.Parameter(torch.randn(size // 4, device=device))
    small = torch.randn(16, device=device)
    costs = {kind: PythonCost() for kind in KINDS}

    def wait_for_io() -> None:
        for region in engine.mover.busy():
            if region.transfer.operation is not None:
                region.transfer.operation.wait(60)

    tape, handles = Tape(), []
    for _ in range(COUNTED):
        next_operator(parameter)
        tensor = torch.randn(size // 4, device=device)
        with costs["offloaded"]:
            handles.append(engine.pack(tape, tensor))
        wait_for_io()
    with costs["offloaded"]:
        engine.finish_forward(tape)
    wait_for_io()
    with costs["offloaded"]:
        engine.drain()
    with costs["used"]:
        engine.prefetch(tape)
    while handles:
        wait_for_io()
        with costs["used"]:
            engine.unpack(handles.pop())
    with costs["used"]:
        engine.drain()
    shared, resident = Tape(), Tape(keep=True)
    handles.append(engine.pack(shared, tensor))
    for _ in range(COUNTED):
        other = torch.randn(size // 4, device=device)
        with costs["joined"]:
            handles.append(engine.pack(shared, tensor))
        with costs["kept"]:
            handles.append(engine.pack(resident, other))
        with costs["small"]:
            engine.pack(shared, small)
        with costs["refused"]:
            engine.pack(shared, parameter)
    engine.finish_forward(shared)
    wait_for_io()
    handles.clear()
    engine.drain()
    return costs


def measure(arguments: Any, directory: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    keep_freed_memory()
    runtime = make_runtime(arguments.size, directory)
    engine = runtime.engine
    assert engine is not None
    device = engine.eligible.device
    numel = arguments.size // 4
    parameter = torch.nn.Parameter(torch.randn(numel, device=device))
    small = torch.randn(16, device=device)
    on_cpu = torch.autograd.graph.save_on_cpu().pack_hook
    seconds: dict[str, list[float]] = {}

    def timed(name: str, hook: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> object:
        began = time.perf_counter()
        held = hook(tensor)
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return held

    for turn in range(arguments.rounds + 5):
        if turn == 5:
            seconds.clear()  # the first rounds grow the spill file
        tape = Tape()

        def pack(tensor: torch.Tensor, tape: Tape = tape) -> object:
            return engine.pack(tape, tensor)

        held = []
        for _ in range(4):
            tensor = torch.randn(numel, device=device)
            held += [timed("refused", pack, parameter), timed("small", pack, small)]
            next_operator(parameter)
            held += [timed("offloaded", pack, tensor), timed("joined", pack, tensor)]
            held += [timed("save_on_cpu", on_cpu, tensor)]  # type: ignore[arg-type]
        engine.finish_forward(tape)
        settle(runtime)
        held.clear()
        runtime.engine.drain()  # type: ignore[union-attr]
    found = runtime.statistics()
    assert found is not None
    offloaded = found.offload.offloaded_bytes
    runtime.close()
    figures: dict[str, Any] = {"tensor_bytes": arguments.size, "rounds": arguments.rounds}
    figures["offloaded_bytes"] = offloaded
    for name, values in seconds.items():
        low, middle, high = (quarter * 1e6 for quarter in statistics.quantiles(values, n=4))
        figures |= {f"{name}_us": middle, f"{name}_quarter_us": low, f"{name}_three_quarters_us": high}
        figures[f"{name}_mean_us"] = statistics.fmean(values) * 1e6  # of stores only some wake the I/O pool
    for name, cost in python_costs(arguments.size, directory).items():
        figures[f"{name}_opcodes"] = cost.opcodes.total() / COUNTED
        figures[f"{name}_calls"] = cost.calls.total() / COUNTED
    for name, goal in GOALS.items():
        figures[f"{name}_within_goal"] = figures[f"{name}_us"] <= goal
    return {**figures, **hardware(directory), "torch": torch.__version__, "device": device.type}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--size", type=parse_size, default=MiB, help="bytes of an offloaded tensor")
    arguments.add_argument("--rounds", type=int, default=200, help="of four calls each")
    arguments.add_argument(
        "--directory", type=Path, default=None, help="on the drive to measure; default: temporary"
    )
    arguments.add_argument(
        "--device",
        choices=("cuda",),
        default=None,
        help="measure CPU time beside peers on this device instead",
    )
    arguments.add_argument("--operators", type=int, default=128, help="of a chain on that device")
    arguments.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of tensors on that device"
    )
    arguments.add_argument("--ways", nargs="*", default=(), help="of that device, beside plain; default: all")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as temporary:
        directory = chosen.directory or Path(temporary)
        if chosen.device is None:
            return finish(measure(chosen, directory), chosen.json)
        chain = Chain(chosen.size, chosen.operators, getattr(torch, chosen.dtype))
        figures = measure_cuda(chain, min(chosen.rounds, 25), directory, chosen.ways)
        finish({**figures, **hardware(directory), "torch": torch.__version__}, chosen.json)


if __name__ == "__main__":
    main()
