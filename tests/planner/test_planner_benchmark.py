"""How the benchmark of the planner compares plans."""

from __future__ import annotations

import random
import statistics

from benchmarks.planner_choice import over_best


def test_plans_that_take_the_same_time_are_as_fast_as_the_best_of_them() -> None:
    noise = random.Random(0)
    found, naive = [], []
    for _ in range(50):
        plans = [[1 + 0.05 * noise.random() for _ in range(30)] for _ in range(6)]
        found.append(statistics.median(over_best(plans[0], plans[1:])))
        naive.append(statistics.median(plans[0]) / min(map(statistics.median, plans[1:])))
    assert abs(statistics.mean(found) - 1) < 0.002 < statistics.mean(naive) - 1


def test_a_slower_plan_is_slower_by_as_much() -> None:
    assert over_best([1.1] * 6, [[1.0] * 6, [1.2] * 6]) == [1.1] * 6
