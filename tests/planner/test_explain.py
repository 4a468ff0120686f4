"""Reasons that a plan's table gives for an action."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ssdtrain.planner.explain import limit_text, plan_table
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import KEPT, Block, Choice, Machine, Tier, one_after_the_other
from ssdtrain.planner.plans import Plan, SearchProblem, actions_for, kept_step, play
from ssdtrain.tools.whatif.explain import rows

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


def reason_of(count: int) -> str:
    """The row of `count` blocks alike that a slow drive has to write."""
    blocks = [Block(f"block {number}", 0.01, 0.02, 1000) for number in range(count)]
    machine = Machine((Tier("ssd", 2e3, 1e3, depth=1 << 30),), in_flight=1000)
    order = one_after_the_other()
    problem = SearchProblem([blocks], order, machine, actions_for(machine))
    actions = ("ssd",) * count
    plan = Plan(actions, simulate([blocks], problem.choices(actions), order, machine))
    stage = SimpleNamespace(problem=problem, plan=plan, simulated=1)
    [row] = rows(cast(Any, stage))
    return row.reason


def test_the_seconds_of_writes_are_those_of_all_blocks_of_the_row_and_waits_are_no_part_of_them() -> None:
    found = re.fullmatch(
        r"writing these 8 takes (.+); computation waits (.+) for their transfers and those before them",
        reason_of(8),
    )
    assert seconds(found[1]) == 8 * 1000 / 2e3
    assert seconds(found[2]) > 0
    assert reason_of(1).startswith("writing it takes 500 ms")


GB = 10**9


def limited(rate: float, left: int, leave: str = "ssd") -> str:
    """What limits a plan by which the first `left` of eight blocks leave, to a drive of so many GB/s. Each saves 1 GB
    in 0.1 s."""
    blocks = [Block(f"block {number}", 0.1, 0.2, GB) for number in range(8)]
    drive = Tier("ssd", rate * GB, rate * GB)
    machine = Machine((drive,), prefetch=GB, window=GB, in_flight=2 * GB, newest=1)
    actions = {"keep": KEPT, leave: Choice("ssd")}
    problem = SearchProblem([blocks], one_after_the_other(), machine, actions)
    return limit_text(problem, play(problem, [leave] * left + ["keep"] * (8 - left)))


def test_a_drive_that_forward_outruns_is_the_limit() -> None:
    assert limited(5, left=2) == "drive writes 5.00 GB/s, forward saves 10.0 GB/s"


@pytest.mark.parametrize("leave", ["ssd", "offload"], ids=["blocks", "regions"])
def test_a_drive_with_which_twice_as_fast_the_peak_would_be_lower_is_the_limit(leave: str) -> None:
    assert limited(11, left=2, leave=leave) == "drive of 11.0 GB/s: twice as fast, the peak would be 1.86 GiB"


def test_where_a_faster_drive_would_not_help_it_is_the_order_of_the_step() -> None:
    assert limited(11, left=7) == "the order of the step: what is kept would not lower the peak"


def test_nothing_limits_a_plan_by_which_everything_leaves() -> None:
    assert limited(5, left=8) == ""


@pytest.mark.parametrize("stepping", [0.0, 2.0])
def test_the_table_says_what_is_waited_for_the_steps_of_cpus(stepping: float) -> None:
    block = Block("block", 1.0, 2.0, GB, cpu_step=stepping)
    problem = SearchProblem([[block]], one_after_the_other(), Machine((), steps_inside=True), {"keep": KEPT})
    table = plan_table("plan auto", problem, [play(problem, ["keep"])], kept_step(problem))
    assert (", waits 2.00 s for the CPU's steps" in table) == bool(stepping)
