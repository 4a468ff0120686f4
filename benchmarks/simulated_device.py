"""What offloading costs a GPU's time line, on a simulated device and drive in virtual time.

    python -m benchmarks.simulated_device --json

The real engine (hooks, mover, transfers, prefetcher, store) against `tests.support.simulated`: asynchronous streams, copies over
a link of set bandwidth, memory that is reused at once, drives of set bandwidth. Figures of a run are exact and repeatable; they
say what the order of copies, reads and waits allows, and nothing about the time of kernels, hooks or the driver.

A load is a model (seconds of each layer's forward and backward, bytes of each saved tensor), a link and a drive, 1/64 of a
GPU's: 1 MiB stands for 64 MiB. Two steps run, the second is measured. `ideal` is the same step with everything kept; `bound`
what the slowest link allows for the bytes that moved. `sufficient` loads are those whose links could carry everything in the
time of forward.

The last line is one JSON object: per load the figures below, at the top the worst of each over the sufficient loads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import parser
from ssdtrain.config.units import MiB
from ssdtrain.offload.options import EngineOptions
from tests.support.simulated.measure import bound, overlap, phase_seconds
from tests.support.simulated.training import (
    LayerTimes,
    Machine,
    keep_peak,
    one_forward_one_backward,
    train,
)

SCALE = 64
GB = 1e9 / SCALE  # bytes per second that stand for 1 GB/s
KB = 1 << 10

# What a GPT layer saves, operator by operator: parts of its bytes (34 s b h in all), and of its time.
GPT_OPERATORS = (
    (2, 0.03),  # norm
    (6, 0.25),  # query, key, value
    (2, 0.10),  # attention
    (2, 0.03),  # norm
    (8, 0.28),  # first half of the MLP
    (8, 0.03),  # its activation function
    (2, 0.25),  # second half
    (4, 0.03),  # dropout and residual
)
GPT_PARTS = sum(part for part, _ in GPT_OPERATORS)


@dataclass(frozen=True)
class Load:
    """One case: the model, the machine, and how it is run."""

    layers: tuple[LayerTimes, ...]
    pcie: float
    drive: float
    buffer: int = 16 * MiB
    in_flight: int | None = None
    buffer_limit: int | None = None
    host_bytes: int = 0
    microbatches: int = 1

    alive: int = 1  # microbatches between forward and backward at once

    @property
    def order(self) -> list[tuple[str, int]]:
        return one_forward_one_backward(self.microbatches, self.alive)

    @property
    def kept(self) -> int:
        """Bytes alive at once where everything is kept."""
        return self.alive * keep_peak(self.layers)

    @property
    def sufficient(self) -> bool:
        """True if the links could carry all that is saved while forward runs."""
        forward = sum(layer.forward for layer in self.layers)
        return keep_peak(self.layers) / forward <= 0.9 * min(self.pcie, self.drive)


def uniform(count: int, nbytes: int, forward: float, backward: float | None = None) -> tuple[LayerTimes, ...]:
    """Layers that save one tensor each."""
    return (LayerTimes(forward, 2 * forward if backward is None else backward, (nbytes,)),) * count


def gpt(count: int, nbytes: int, forward: float) -> tuple[LayerTimes, ...]:
    """Layers of a GPT, each an operator after the other, that save `nbytes` a layer."""
    return tuple(
        LayerTimes(forward * share, 2 * forward * share, (nbytes * part // GPT_PARTS // KB * KB,))
        for _ in range(count)
        for part, share in GPT_OPERATORS
    )


def fused(count: int, nbytes: int, forward: float) -> tuple[LayerTimes, ...]:
    """The same layers, each one operator that saves everything at its end."""
    saved = tuple(nbytes * part // GPT_PARTS // KB * KB for part, _ in GPT_OPERATORS)
    return (LayerTimes(forward, 2 * forward, saved),) * count


LOADS: dict[str, Callable[[float], Load]] = {
    "uniform 24 layers, half of the drive": lambda pcie: Load(uniform(24, MiB, 0.008), pcie, 12.8 * GB),
    "uniform 24 layers, most of PCIe": lambda pcie: Load(
        uniform(24, MiB, MiB / (0.8 * pcie)), pcie, 2 * pcie
    ),
    "gpt 24 layers": lambda pcie: Load(gpt(24, 4 * MiB, 4 * MiB / (12 * GB)), pcie, 20 * GB, 32 * MiB),
    "fused 24 layers": lambda pcie: Load(fused(24, MiB, MiB / (12 * GB)), pcie, 20 * GB),
    "gpt 64 layers": lambda pcie: Load(gpt(64, 2 * MiB, 2 * MiB / (12 * GB)), pcie, 20 * GB, 32 * MiB),
    "gpt 24 layers, 4 microbatches": lambda pcie: Load(
        gpt(24, MiB, MiB / (10 * GB)), pcie, 15 * GB, microbatches=4
    ),
    "gpt 12 layers, 1F1B of 8 microbatches, 4 alive": lambda pcie: Load(
        gpt(12, MiB, MiB / (8 * GB)), pcie, 15 * GB, 32 * MiB, microbatches=8, alive=4
    ),
    "gpt 24 layers, host tier": lambda pcie: Load(
        gpt(24, 2 * MiB, 2 * MiB / (10 * GB)), pcie, 15 * GB, 32 * MiB, host_bytes=64 * MiB
    ),
    "uniform 24 layers of 512 MiB": lambda pcie: Load(
        uniform(24, 8 * MiB, 8 * MiB / (0.8 * pcie)), pcie, pcie, buffer_limit=128 * MiB
    ),
    "uniform 24 layers, one SSD of 6.4 GB/s": lambda pcie: Load(uniform(24, MiB, 0.004), pcie, 6.4 * GB),
    "gpt 24 layers, one SSD of 6.4 GB/s": lambda pcie: Load(
        gpt(24, 4 * MiB, 4 * MiB / (12 * GB)), pcie, 6.4 * GB, 32 * MiB
    ),
}


def measure(load: Load) -> dict[str, Any]:
    """The figures of one load."""
    plain = Machine(load.pcie, [(load.drive, load.drive)])
    ideal = train(plain, None, load.layers, order=load.order)
    with Machine(load.pcie, [(load.drive, load.drive)]) as machine:
        engine = machine.engine(
            EngineOptions(
                min_bytes=1024,
                in_flight=load.in_flight,
                buffer=load.buffer,
                buffer_limit=load.buffer_limit,
                prefetch=load.buffer // 2 if load.buffer_limit is None else None,
                staged=True,
            ),
            host_bytes=load.host_bytes,
        )
        train(machine, engine, load.layers, order=load.order)
        before = engine.snapshot()
        engine.reset_peak()
        record = train(machine, engine, load.layers, order=load.order, seed=1)
        after = engine.snapshot()
        in_flight = engine.mover.stores.limit
    moved = (after.offloaded_bytes - before.offloaded_bytes) / load.microbatches
    loaded = (after.loaded_bytes - before.loaded_bytes) / load.microbatches
    # What is in flight when forward ends was not waited for.
    stored = max(0.0, moved - in_flight)
    forward, backward = bound(load.layers, stored, loaded, load.drive, load.pcie)
    total = record.ended - record.began
    return {
        "sufficient": load.sufficient,
        "forward_over_ideal": phase_seconds(record, "forward") / phase_seconds(ideal, "forward"),
        "backward_over_ideal": phase_seconds(record, "backward") / phase_seconds(ideal, "backward"),
        "total_over_ideal": total / (ideal.ended - ideal.began),
        "total_over_bound": total / (load.microbatches * (forward + backward)),
        "d2h_overlap": overlap(record.to_host, record.compute),
        "h2d_overlap": overlap(record.to_device, record.compute),
        "host_syncs": record.host_syncs,
        "outside_bytes": after.outside_bytes - before.outside_bytes,
        "peak_over_keep": after.activation_peak_bytes / load.kept,
        "offloaded_share": moved / keep_peak(load.layers),
        "store_wait_seconds": after.store_wait_seconds - before.store_wait_seconds,
        "load_wait_seconds": after.load_wait_seconds - before.load_wait_seconds,
        "bits_equal": not record.wrong,
    }


# Over the sufficient loads: the worst.
WORST: dict[str, Callable[[Any], Any]] = {
    "forward_over_ideal": max,
    "backward_over_ideal": max,
    "total_over_ideal": max,
    "d2h_overlap": min,
    "h2d_overlap": min,
    "host_syncs": max,
    "outside_bytes": max,
    "peak_over_keep": max,
    "bits_equal": all,
}


def described(found: dict[str, Any]) -> str:
    """The figures of one load for people."""
    return (
        f"forward x{found['forward_over_ideal']:.3f}, backward x{found['backward_over_ideal']:.3f}, "
        f"total x{found['total_over_bound']:.3f} of the bound, overlapped D2H {found['d2h_overlap']:.2f} "
        f"H2D {found['h2d_overlap']:.2f}, {found['host_syncs']} host syncs, {found['outside_bytes']} bytes outside, "
        f"peak x{found['peak_over_keep']:.2f}{'' if found['bits_equal'] else ', WRONG BYTES'}"
        f"{'' if found['sufficient'] else ' (limited)'}"
    )


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument(
        "--pcie", type=float, nargs="+", default=[25.0, 50.0], help="GB/s of the link, each way"
    )
    chosen: argparse.Namespace = made.parse_args(arguments)
    loads = {}
    for pcie in chosen.pcie:
        for name, made_load in LOADS.items():
            found = loads[f"{name}, PCIe {pcie:g}"] = measure(made_load(pcie * GB))
            print(f"{name}, PCIe {pcie:g}: {described(found)}", flush=True)
    enough = [found for found in loads.values() if found["sufficient"]]
    limited = [found for found in loads.values() if not found["sufficient"]]
    result: dict[str, Any] = {name: worst(found[name] for found in enough) for name, worst in WORST.items()}
    result["total_over_bound"] = max((found["total_over_bound"] for found in limited), default=None)
    print(json.dumps({"benchmark": "simulated_device", **result, "loads": loads}))


if __name__ == "__main__":
    main()
