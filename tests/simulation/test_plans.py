"""The cost model against the real engine on the simulated device, whose figures are exact."""

from itertools import product

import pytest
import torch

from benchmarks.planner_simulated import BLOCKS, problem_of, run
from benchmarks.simulated_device import GB, Load, gpt
from ssdtrain.config.units import MiB
from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.plans import in_part

ACTIONS = {"k": "keep", "o": "offload", "r": "recompute", "p": in_part("offload", (8, 0, 8, 0, 8, 8, 0, 0))}


QUICK = ["kkko", "okkk", "oooo", "orok", "okrk", "rrro", "ppkk", "pppp", "prpk", "oppr"]
EVERY = ["".join(plan) for plan in product("kor", repeat=BLOCKS)]


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize(
    "plans", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every plan"]
)
def test_the_predicted_peak_and_time_of_a_plan_are_those_of_the_engine(
    in_flight: int, plans: list[str]
) -> None:
    load = Load(gpt(BLOCKS, MiB, MiB / (3 * GB)), 25 * GB, 12 * GB, 4 * MiB, in_flight * MiB // 4)
    for plan in plans:
        chosen = [ACTIONS[letter] for letter in plan]
        found, machine = run(load, chosen)
        problem = problem_of(load, machine)
        choices = problem.choices(chosen)
        predicted = simulate(problem.chunks, choices, problem.order, machine, steps=2)
        assert predicted.peak_bytes == pytest.approx(found.peak, rel=0.04), plan
        assert predicted.seconds == pytest.approx(found.seconds, rel=0.1), plan


def test_memory_that_was_released_is_not_counted_beside_what_takes_its_place() -> None:
    meter = ActivationMeter()
    before = torch.empty(100, dtype=torch.uint8)
    meter.see(before.untyped_storage())
    del before
    after = torch.empty(100, dtype=torch.uint8)
    meter.see(after.untyped_storage())
    assert meter.peak_bytes == 100
