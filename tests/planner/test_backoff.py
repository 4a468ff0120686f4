"""The same finding with no better plan is searched for at growing intervals, and what was reduced for it returns."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest

from benchmarks.adaptive_amount import AutoRun
from benchmarks.simulated_device import GB, Load, gpt
from ssdtrain.config.units import MiB
from ssdtrain.planner.derating import (
    CALM_STEPS,
    DRIFTED,
    LEAST,
    LONGEST_BACKOFF,
    MOST_CALM_STEPS,
    SHORTEST,
    STALLS,
    BandwidthDerating,
    Cause,
    Rates,
    StallMargin,
)
from ssdtrain.planner.finder import Goal
from ssdtrain.storage.metrics import StoreMetrics


def searches(cause: Cause, steps: range, *, new: bool = False) -> list[int]:
    """Steps in which one is made, where it is seen in each."""
    found = []
    for step in steps:
        cause.observe(True)
        if cause.due(step):
            found.append(step)
            cause.searched(step, STALLS, new=new)
    return found


def test_a_search_that_brings_nothing_new_is_made_after_twice_as_many_steps() -> None:
    cause = Cause(STALLS)
    found = searches(cause, range(600))
    waits = [later - step for step, later in pairwise(found)]
    assert waits[:6] == [SHORTEST, 8, 16, 32, 64, LONGEST_BACKOFF]
    assert set(waits[6:]) == {LONGEST_BACKOFF}
    cause.searched(700, STALLS, new=True)
    assert searches(cause, range(701, 716)) == [702, 706, 714]
    assert searches(Cause(STALLS), range(6), new=True) == [1, 3, 5]  # seen in two steps in turn
    cause.searched(5000, STALLS, new=False)  # long after it was due: what came before is forgotten
    assert searches(cause, range(5001, 5020)) == [5004, 5012]
    cause.searched(6000, DRIFTED, new=False)
    assert searches(cause, range(6001, 6005)) == [6002]  # for another cause: it does not wait


def test_a_drive_that_changes_between_two_speeds_is_planned_for_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, store = [], StoreMetrics()
    derating = BandwidthDerating(store, None)
    speeds = itertools.cycle([Rates(1e9, 1e9)] * 3 + [Rates(4e9, 4e9)] * 3)
    monkeypatch.setattr(derating._bandwidths, "since", lambda _: next(speeds))
    derating.step_ended(store, 0, 0.0)
    derating.planned(0, "profiled", same=False, new=True)
    for step in range(1, 600):
        derating.step_ended(store, 0, 0.0)
        if derating.drifted(step):
            plans.append(step)
            derating.planned(step, DRIFTED, same=False, new=len(plans) == 1)  # a plan for each speed
    assert 3 < len(plans) < 20


def test_a_drive_that_was_busy_in_one_step_is_planned_with_as_in_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = StoreMetrics()
    derating = BandwidthDerating(store, None)
    speeds = iter(
        [Rates(4e9, 6e9), Rates(4.1e9, None), Rates(2e8, 3e8), Rates(None, None), Rates(None, None)]
    )
    monkeypatch.setattr(derating._bandwidths, "since", lambda _: next(speeds))
    found = []
    for _ in range(5):
        derating.step_ended(store, 0, 0.0)
        found.append(derating.rates)
    assert [one.write for one in found[:3]] == [4e9, 4.1e9, 4e9]
    assert [one.read for one in found[:3]] == pytest.approx([6e9, 6.15e9, 6e9])
    assert found[4] == Rates(2e8, 3e8)  # all that was measured in the latest steps


def test_stalls_that_no_margin_ends_are_searched_for_ever_less_often_and_the_margin_returns() -> None:
    margin, asked, values = StallMargin(), [], []
    for step in range(4 * MOST_CALM_STEPS):
        margin.observe(0.5, 0.0)
        if why := margin.changed(step):
            asked.append(why)
            margin.cause.searched(step, why, new=False)
            margin.planned()
        values.append(margin.value)
    assert min(values) == LEAST
    assert len(asked) < 60
    assert any(later > value for value, later in pairwise(values))


def test_a_margin_with_which_there_is_no_plan_is_not_kept() -> None:
    margin, asked = StallMargin(), []
    for step in range(300):
        margin.observe(0.5, 0.0)
        if why := margin.changed(step):
            assert why == STALLS and margin.value < 1
            asked.append(step)
            margin.cause.searched(step, why, new=False)
            margin.failed()
            assert margin.value == 1
    assert len(asked) <= 8
    for step in range(300, 300 + CALM_STEPS):
        margin.observe(0.0, 0.0)
        assert not margin.changed(step)


@pytest.mark.slow
def test_a_plan_within_limits_whose_transfers_stall_is_not_searched_for_in_every_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Load(gpt(4, MiB, MiB / (10 * GB)), 25 * GB, 12 * GB, 16 * MiB, MiB)
    with AutoRun(load, device_budget=round(0.5 * load.kept)) as run:
        for _ in range(6):
            run.step()
        controller, searched = run.controller, []
        assert controller.plan is not None
        finder = controller._finder
        finder.goal = Goal(round(0.5 * load.kept), slowdown=0.005)
        find = finder.find
        monkeypatch.setattr(finder, "find", lambda *given: searched.append(1) or find(*given))
        monkeypatch.setattr(run.regions, "stalled", lambda fresh, total: 0.5)
        for _ in range(80):
            run.step()
        assert 1 <= len(searched) <= 12
