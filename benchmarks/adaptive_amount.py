"""`offload.amount: "auto"` on the simulated device, against keeping everything and against the best fixed choice of blocks.

    python -m benchmarks.adaptive_amount --json

The real engine, policy and controller in virtual time (`tests.support.simulated`): figures are exact and repeatable. For
drives of 3, 6, 12 and 25 GB/s and links of 25 and 50 GB/s: total time and activation peak after the plan has settled,
relative to keeping everything, beside the lowest peak of all subsets of layers whose offload takes at most 1.02 of the time
of keeping everything. Then a drive that is throttled to a tenth for ten steps, and layers of few, large tensors, offloaded whole
and in parts.

The last line is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.common import parser
from benchmarks.simulated_device import GB, Load, gpt, uniform
from ssdtrain.config.units import MiB
from ssdtrain.features import Step
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.policy import KEEP, OFFLOAD, OffloadPolicy
from ssdtrain.offload.transfer.coding import CodecRule
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.finder import Goal
from ssdtrain.planner.regions import AdaptivePolicy, Regions
from ssdtrain.storage import Endurance
from tests.support.simulated.training import Machine, keep_peak, train

__all__ = ["AutoRun", "Found", "fixed_run"]

MEMORY = 1000 * GB
"""Bytes per second of a copy within a GPU's memory: a third of what an H100 moves, by its data sheet, for reading and writing."""


@dataclass(frozen=True)
class Found:
    """One step."""

    total_over_keep: float
    peak_over_keep: float
    stored: float
    """Bytes offloaded, of those saved."""
    wrong: list[str]


def _engine(
    machine: Machine,
    load: Load,
    policy: OffloadPolicy,
    capacity: int = 1 << 30,
    codec: CodecRule | None = None,
) -> OffloadEngine:
    options = EngineOptions(
        min_bytes=1024,
        in_flight=load.in_flight,
        buffer=load.buffer,
        prefetch=load.buffer // 2,
        staged=True,
        codec=codec,
    )
    return machine.engine(options, host_bytes=load.host_bytes, capacity=capacity, policy=policy)


def keep_seconds(load: Load) -> float:
    """Of a step that keeps everything."""
    plain = Machine(load.pcie, [(load.drive, load.drive)])
    record = train(plain, None, load.layers, order=load.order)
    return record.ended - record.began


def _step(machine: Machine, engine: OffloadEngine, load: Load, seed: int) -> tuple[float, Found]:
    engine.reset_peak()
    before = engine.snapshot().offloaded_bytes
    record = train(machine, engine, load.layers, order=load.order, seed=seed)
    after = engine.snapshot()
    stored = (after.offloaded_bytes - before) / (keep_peak(load.layers) * load.microbatches)
    seconds = record.ended - record.began
    return seconds, Found(
        seconds / keep_seconds(load), after.activation_peak_bytes / load.kept, stored, record.wrong
    )


class AutoRun:
    """Steps of one load under `amount: "auto"`.

    Args:
        capacity: bytes of the drive.
        memory: bytes per second of copies within the device's memory; None: not known, and nothing is offloaded in part.
        device_budget, endurance: see `Goal.of_budget` and `PlanController`.
        codec: of what leaves.
    """

    def __init__(
        self,
        load: Load,
        *,
        capacity: int = 1 << 30,
        memory: float | None = None,
        device_budget: int | None = None,
        endurance: Endurance | None = None,
        codec: CodecRule | None = None,
    ) -> None:
        self.load = load
        self._bandwidth = load.drive
        self._machine = Machine(load.pcie, [(load.drive, load.drive)], memory=memory)
        policy = AdaptivePolicy()
        self.engine = _engine(self._machine, load, policy, capacity, codec)
        self.regions = Regions(self.engine, policy, limited=device_budget is not None)
        goal = Goal.of_budget(device_budget)
        self.controller = PlanController(
            self.engine, self._machine.store, self.regions, goal, endurance=endurance
        )
        self._steps = 0

    @property
    def plans(self) -> int:
        return self.controller.metric.plans

    @property
    def predicted_peak_over_keep(self) -> float:
        """Of the plan that is followed."""
        return self.controller.metric.predicted_peak_bytes / self.load.kept

    def snapshot(self) -> OffloadMetrics:
        return self.engine.snapshot()

    @property
    def written(self) -> tuple[int, float]:
        """Bytes that the drive was written, and the present time."""
        return self._machine.pool.drives[0][0].nbytes, self._machine.timeline.now

    def step(self) -> Found:
        self._steps += 1
        seconds, found = _step(self._machine, self.engine, self.load, self._steps)
        self.controller.on_step_end(Step(self._steps, seconds, forwards=1, elapsed=seconds))
        return found

    def evaluate(self) -> None:
        """A forward whose backward never comes."""
        train(self._machine, self.engine, self.load.layers, order=[("forward", 0)])

    def throttle(self, factor: float) -> None:
        """The drive has this share of its bandwidth from now on."""
        for channels in self._machine.pool.drives:
            for channel in channels:
                channel.bandwidth = self._bandwidth * factor

    def __enter__(self) -> AutoRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.close()


class _Fixed:
    needs_modules = False

    def __init__(self, plan: Sequence[bool]) -> None:
        self._followed = AdaptivePolicy()
        self._followed.follow({0: [OFFLOAD if one else KEEP for one in plan]})
        self.decide = self._followed.decide

    def observe(self, forward: object) -> None:
        return None


def fixed_run(load: Load, plan: Sequence[bool]) -> Found:
    """The third step with the tensors of these layers offloaded."""
    with Machine(load.pcie, [(load.drive, load.drive)]) as machine:
        each = len(load.layers) // len(plan)
        engine = _engine(machine, load, _Fixed([one for one in plan for _ in range(each)]))
        return [_step(machine, engine, load, seed)[1] for seed in range(3)][-1]


def settled(load: Load, steps: int = 8, memory: float | None = None) -> Found:
    """The last of some steps under "auto"."""
    with AutoRun(load, memory=memory) as run:
        return [run.step() for _ in range(steps)][-1]


def coarse(layers: int, drive: float) -> Load:
    """Layers that save three tensors of one size each, 10 GB/s, on a drive of `drive` GB/s."""
    return Load(uniform(3 * layers, MiB, MiB / (10 * GB)), 25 * GB, drive * GB, 4 * MiB)


def in_parts(layers: int, drive: float) -> dict[str, Any]:
    """Coarse layers whose tensors are offloaded whole, and in parts."""
    load = coarse(layers, drive)
    whole, parts = settled(load), settled(load, memory=MEMORY)
    return {
        "whole_peak_over_keep": whole.peak_over_keep,
        "whole_total_over_keep": whole.total_over_keep,
        "peak_over_keep": parts.peak_over_keep,
        "total_over_keep": parts.total_over_keep,
        "bits_equal": not whole.wrong and not parts.wrong,
    }


def against_all(layers: int, drive: float, pcie: float) -> dict[str, Any]:
    """The policy's choice, and the lowest peak of every choice of layers within 1.02 of keeping everything."""
    load = Load(gpt(layers, MiB, MiB / (10 * GB)), pcie * GB, drive * GB, 16 * MiB, MiB)
    found = settled(load)
    every = [fixed_run(load, plan) for plan in product((False, True), repeat=layers)]
    lowest = min(one.peak_over_keep for one in every if one.total_over_keep <= 1.02)
    return {
        "total_over_keep": found.total_over_keep,
        "peak_over_keep": found.peak_over_keep,
        "lowest_peak_over_keep": lowest,
        "peak_over_lowest": found.peak_over_keep / lowest,
        "bits_equal": not found.wrong,
    }


def throttled() -> dict[str, Any]:
    """A drive at a tenth of its bandwidth for ten steps."""
    load = Load(gpt(12, 2 * MiB, 2 * MiB / (12 * GB)), 25 * GB, 12 * GB, 32 * MiB)
    with AutoRun(load) as run:
        before = [run.step() for _ in range(8)][-1]
        run.throttle(0.1)
        slow = [run.step() for _ in range(10)]
        run.throttle(1.0)
        after = [run.step() for _ in range(10)][-1]
    return {
        "before": before.total_over_keep,
        "first_step": slow[0].total_over_keep,
        "after_10_steps": slow[-1].total_over_keep,
        "stored_before": before.stored,
        "stored_throttled": slow[-1].stored,
        "stored_after": after.stored,
    }


def on_teraio_hardware() -> dict[str, Any]:
    """Layers of an 8-billion-parameter model on an H100 with four consumer drives, as in TERAIO's machine (arXiv 2506.06472), by
    the data sheets: a link of PCIe 5.0 x16 (50 GB/s as measured by many), drives of 4 x 6.9 GB/s written and 4 x 7.4 GB/s read,
    of which the lower counts. Hidden size 4096: 34 x 4096 bytes are saved per token and layer in the time of 24 x 4096^2 FLOPs at
    400 TFLOP/s, so 138 GB/s. `ideal` is unlimited memory: everything kept."""
    saved = 34 * 4096 / (24 * 4096**2 / 400e12) / 1e9
    load = Load(gpt(32, MiB, MiB / (saved * GB)), 50 * GB, 4 * 6.9 * GB, 32 * MiB, 8 * MiB)
    found = settled(load)
    return {
        "saved_gb_per_second": saved,
        "of_ideal": 1 / found.total_over_keep,
        "peak_over_keep": found.peak_over_keep,
        "bits_equal": not found.wrong,
    }


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument(
        "--layers", type=int, default=6, help="of the exhaustive search, which tries each subset"
    )
    chosen = made.parse_args(arguments)
    loads: dict[str, Any] = {}
    for pcie in (25.0, 50.0):
        for drive in (3.0, 6.0, 12.0, 25.0):
            found = loads[f"drive {drive:g}, PCIe {pcie:g}"] = against_all(chosen.layers, drive, pcie)
            print(
                f"drive {drive:g}, PCIe {pcie:g}: total x{found['total_over_keep']:.3f}, peak x{found['peak_over_keep']:.3f} "
                f"(lowest x{found['lowest_peak_over_keep']:.3f})",
                flush=True,
            )
    parts: dict[str, Any] = {}
    for layers in (1, 2, 3, 4, 8):
        for drive in (1.0, 2.0, 6.0):
            found = parts[f"{layers} coarse layers, drive {drive:g}"] = in_parts(layers, drive)
            print(
                f"{layers} coarse layers, drive {drive:g}: whole total x{found['whole_total_over_keep']:.3f}, peak "
                f"x{found['whole_peak_over_keep']:.3f}; in parts x{found['total_over_keep']:.3f}, x{found['peak_over_keep']:.3f}",
                flush=True,
            )
    result = {
        "total_over_keep": max(found["total_over_keep"] for found in loads.values()),
        "peak_over_lowest": max(found["peak_over_lowest"] for found in loads.values()),
        "bits_equal": all(found["bits_equal"] for found in loads.values()),
        "throttled": throttled(),
        "teraio_hardware": on_teraio_hardware(),
    }
    print(json.dumps({"benchmark": "adaptive_amount", **result, "loads": loads, "parts": parts}))


if __name__ == "__main__":
    main()
