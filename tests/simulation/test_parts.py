"""Parts of regions on the simulated device: what is copied where and when, and that "auto" uses it where tensors are coarse."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.adaptive_amount import MEMORY, AutoRun, coarse, in_parts
from benchmarks.simulated_device import GB, Load, gpt
from ssdtrain.config.units import MiB
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.policy import KEEP
from ssdtrain.planner.explain import Outcome, plan_table
from ssdtrain.planner.plans import kept_step
from tests.offload.conftest import Parts
from tests.simulation.conftest import random_layers
from tests.support.simulated.training import LayerTimes, Machine, one_forward_one_backward, train


def steps(
    layers: tuple[LayerTimes, ...], policy: Parts, *, count: int = 3, host_bytes: int = 0, **machine: Any
) -> OffloadMetrics:
    with Machine(400e6, [(machine.pop("drive", 200e6),) * 2], memory=4e9, **machine) as made:
        options = EngineOptions(
            min_bytes=1024, in_flight=2 * MiB, buffer=4 * MiB, prefetch=2 * MiB, staged=True
        )
        engine = made.engine(options, host_bytes=host_bytes, policy=policy)
        for seed in range(count):
            record = train(made, engine, layers, order=one_forward_one_backward(2, 2), seed=seed)
            assert not record.wrong and not record.host_syncs
        return engine.snapshot()


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(("drive", "count"), [(4e6, 8), (50e6, 20), (400e6, 20)])
def test_every_tensor_comes_back_as_it_was(part: float, drive: float, count: int) -> None:
    """From the drive, from the staging buffer of a store that is under way, or cancelled after the tensor was released."""
    found = steps((LayerTimes(0.002, 0.004, (MiB // 4,)),) * count, Parts(part), drive=drive)
    assert found.offloaded_bytes + found.avoided_write_bytes == part * found.saved_bytes
    assert found.kept_bytes == (1 - part) * found.saved_bytes
    assert found.activation_bytes == 0
    assert found.forwarded_bytes + found.avoided_write_bytes > 0 if drive == 4e6 else found.loaded_bytes > 0


def test_a_pinned_host_tier_takes_parts_too() -> None:
    found = steps((LayerTimes(0.002, 0.004, (MiB // 4,)),) * 20, Parts(0.25, 0.75), host_bytes=16 * MiB)
    assert found.loaded_bytes > 0 and found.kept_bytes > 0


@pytest.mark.parametrize("seed", range(6))
def test_random_models_on_random_machines_read_back_what_they_saved(seed: int) -> None:
    generator = random.Random(seed)
    steps(
        random_layers(generator),
        Parts(*(generator.choice((0.1, 0.25, 0.5, 0.75, 1.0)) for _ in range(5))),
        drive=generator.choice((20e6, 100e6, 400e6)),
        host_bytes=generator.choice((0, 2 * MiB)),
        jitter=lambda seconds: seconds * generator.uniform(0.1, 10),
    )


@pytest.mark.parametrize(("layers", "drive"), [(2, 1.0), (2, 6.0), (3, 2.0)])
def test_coarse_layers_leave_in_parts_at_a_lower_peak_and_the_same_time(layers: int, drive: float) -> None:
    found = in_parts(layers, drive)
    assert found["bits_equal"] and found["total_over_keep"] <= 1.02
    assert found["peak_over_keep"] <= found["whole_peak_over_keep"] - 0.02


@pytest.mark.parametrize(("layers", "drive"), [(2, 6.0), (3, 2.0)])
def test_the_predicted_peak_is_the_measured_one(layers: int, drive: float) -> None:
    """Where staging memory is full, a store begins late, and its tensor leaves when it would have all the same."""
    with AutoRun(coarse(layers, drive), memory=MEMORY) as run:
        found = [run.step() for _ in range(5)][-1]
        shares = {action.part for action in run.regions.policy.plans[0] if action != KEEP}
        assert any(share < 1 for share in shares)
        assert found.peak_over_keep == pytest.approx(run.predicted_peak_over_keep, abs=1e-6)
        controller = run.controller
        assert controller.plan is not None and controller.problem is not None
        outcome = Outcome(0, 0, 1.0, 0.0, {})
        kept = kept_step(controller.problem)
        table = plan_table("auto", controller.problem, [controller.plan], kept, outcome=outcome)
        assert any(f"{share:.0%} offloaded" in table for share in shares)


def test_slow_copies_and_fine_regions_leave_whole() -> None:
    """Copies that take as long as the link gain nothing; and where regions are small, nothing is different."""
    for load, memory in (
        (coarse(2, 3.0), GB),
        (Load(gpt(8, MiB, MiB / (10 * GB)), 25 * GB, 3 * GB, 16 * MiB, MiB), MEMORY),
    ):
        plans = []
        for known in (None, memory):
            with AutoRun(load, memory=known) as run:
                for _ in range(4):
                    run.step()
                plans.append(run.regions.policy.plans)
        assert plans[0] == plans[1]
