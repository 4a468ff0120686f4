"""Peak and time of plans on the simulated device, against those recorded before the planner had one search.

The real engine follows each plan in virtual time, so figures are exact. `python -m tests.planner.test_golden_scores` records them
again in `golden_scores.json`: a plan that is worse by more than 1% is a defect, whatever made it.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks.adaptive_amount import MEMORY, AutoRun
from benchmarks.planner_simulated import problem_of, run
from benchmarks.simulated_device import GB, Load, gpt, uniform
from ssdtrain.config.units import MiB
from ssdtrain.planner.finder import Goal, PlanFinder
from ssdtrain.planner.plans import NoPlan, kept_step

RECORDED = Path(__file__).with_name("golden_scores.json")
SEEDS = 30
WORSE = 1.01


def by_regions(seed: int) -> dict[str, float]:
    """`offload.amount: "auto"` of a model drawn at random: its fifth step, relative to keeping everything."""
    draw = random.Random(seed)
    fine, drive = draw.random() < 0.7, draw.choice([2, 3, 4, 6, 8, 12, 25])
    layers = draw.randint(2, 4)
    made = (
        gpt(layers, MiB // 4, MiB / 4 / (draw.choice([6, 10, 14]) * GB))
        if fine
        else uniform(3 * layers, MiB // 4, MiB / 4 / (draw.choice([5, 10]) * GB))
    )
    microbatches = draw.choice([1, 1, 1, 4])
    load = Load(
        made,
        draw.choice([25, 50]) * GB,
        drive * GB,
        draw.choice([1, 4]) * MiB,
        draw.choice([None, MiB // 4]),
        host_bytes=draw.choice([0, 0, 0, MiB // 2]),
        microbatches=microbatches,
        alive=min(microbatches, draw.choice([1, 2])),
    )
    budget = draw.choice([None, None, 0.4, 0.7])
    limit = None if budget is None else int(budget * load.kept)
    with AutoRun(load, memory=None if fine else MEMORY, device_budget=limit) as running:
        found = [running.step() for _ in range(5)][-1]
    assert not found.wrong
    return {"peak": found.peak_over_keep, "seconds": found.total_over_keep, "limit": budget or 0.0}


def by_blocks(seed: int) -> dict[str, float]:
    """`plan` of a model drawn at random, its limits from the peaks of keeping and recomputing everything: as `by_regions`."""
    draw = random.Random(1000 + seed)
    count = draw.randint(3, 6)
    load = Load(
        gpt(count, MiB // 4, MiB / 4 / (draw.choice([6, 10, 14]) * GB)),
        draw.choice([25, 50]) * GB,
        draw.choice([2, 3, 6, 12, 25]) * GB,
        draw.choice([1, 4]) * MiB,
        draw.choice([None, MiB // 4]),
        microbatches=draw.choice([1, 1, 2]),
    )
    kept, again = (run(load, (action,) * count)[0] for action in ("keep", "recompute"))
    _, machine = run(load, ("offload",) * count)  # what is in flight follows what was offloaded
    share = draw.choice([0.0, 0.2, 0.4, 0.6, 0.8])
    limit = round(1.01 * again.peak + share * (kept.peak - again.peak))
    goal = Goal(limit)
    if draw.random() < 0.3:
        slowdown = draw.choice([0.05, 0.3])
        goal = Goal(memory=True, slowdown=slowdown, most_slowdown=slowdown)
    problem = problem_of(load, machine)
    with AutoRun(load) as running:
        try:
            plan = PlanFinder(goal, running.engine).find(problem, kept_step(problem)).plans[0]
        except NoPlan as error:
            plan = error.nearest
    found, _ = run(load, plan.actions)
    limited = goal.limit or 0
    return {
        "peak": found.peak / kept.peak,
        "seconds": found.seconds / kept.seconds,
        "limit": limited / kept.peak,
        "slowdown": goal.slowdown or 0.0,
    }


KINDS = {"regions": by_regions, "blocks": by_blocks}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_no_plan_is_worse_than_before(kind: str, seed: int) -> None:
    found, before = KINDS[kind](seed), json.loads(RECORDED.read_text())[kind][seed]
    # Under a limit of memory, what is there may be used.
    assert found["peak"] <= max(WORSE * before["peak"], found["limit"]), (found, before)
    # Without a limit a hundredth of the step may be paid for a lower peak, or what the goal allows.
    allowed = 1.0 if found["limit"] else 1 + found.get("slowdown", 0.01)
    assert found["seconds"] <= WORSE * max(before["seconds"], allowed), (found, before)


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        scores = {kind: list(pool.map(score, range(SEEDS))) for kind, score in KINDS.items()}
    RECORDED.write_text(json.dumps(scores, indent=1) + "\n")
