"""The search against all plans there are."""

import itertools
import random

import pytest

from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import (
    Block,
    Link,
    Machine,
    Tier,
    one_after_the_other,
    one_forward_one_backward,
)
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, SearchProblem, actions_for
from ssdtrain.planner.search import search
from tests.support.tiers import tiered


def blocks(count: int, **more: int) -> list[Block]:
    given = {"saved": 100, "inputs": 10, "backward_transient": 20, **more}
    return [Block(f"b{i}", 1.0, 2.0, recompute=1.0, **given) for i in range(count)]


def machine(rate: float = 100.0, **more: int) -> Machine:
    return Machine(
        (Tier("ssd", rate, rate),), Link(400.0, 400.0), window=200, in_flight=200, prefetch=200, **more
    )


def problem(count: int, rate: float = 100.0, **more: int) -> SearchProblem:
    on = machine(rate)
    return SearchProblem([blocks(count, **more)], one_after_the_other(), on, actions_for(on))


def random_problem(seed: int) -> SearchProblem:
    draw = random.Random(seed)
    alike = draw.random() < 0.5
    sizes = [draw.randint(20, 200) for _ in range(5)]
    made = [
        Block(
            f"b{i}",
            1.0 if alike else draw.uniform(0.5, 2),
            2.0 if alike else draw.uniform(1, 4),
            saved=100 if alike else sizes[i],
            recompute=1.0 if alike else draw.uniform(0.5, 2),
            inputs=draw.choice([5, 15]),
            backward_transient=draw.choice([0, 30]),
        )
        for i in range(5)
    ]
    rate = draw.choice([20.0, 50.0, 100.0, 300.0])
    tiers = (Tier("host", 4 * rate, 4 * rate, capacity=150), Tier("ssd", rate, rate))
    on = Machine(tiers[draw.randint(0, 1) :], Link(500.0, 500.0), window=150, in_flight=300, prefetch=300)
    order = draw.choice([one_after_the_other(), one_forward_one_backward(3, 2)])
    return SearchProblem([made], order, on, actions_for(on))


def all_plans(given: SearchProblem) -> list[Plan]:
    names = list(given.actions)
    found = []
    for chosen in itertools.product(names, repeat=len(given.blocks)):
        choices = [[given.actions[name] for name in chosen]]
        found.append(Plan(chosen, simulate(given.chunks, choices, given.order, given.machine)))
    return found


@pytest.mark.parametrize("seed", tiered(range(12), quick=range(4)))
def test_the_pruned_search_is_as_good_as_trying_everything(seed: int) -> None:
    given = random_problem(seed)
    plans = all_plans(given)
    peaks = sorted(plan.peak for plan in plans)
    for share in (0.0, 0.1, 0.5):
        limit = peaks[int(share * (len(peaks) - 1))]
        best = min(plan.seconds for plan in plans if plan.peak <= limit)
        [exact, *_] = search(given, Limits(device=limit), exact=10**9)
        assert exact.seconds == pytest.approx(best)
        [found, *_] = search(given, Limits(device=limit), exact=0)
        assert found.peak <= limit
        assert found.seconds <= 1.03 * best


def test_the_least_memory_at_a_given_slowdown() -> None:
    given = random_problem(3)
    plans = all_plans(given)
    kept = next(plan for plan in plans if set(plan.actions) == {"keep"})
    allowed = 1.1 * kept.seconds
    least = min(plan.peak for plan in plans if plan.seconds <= allowed)
    [found, *_] = search(given, Limits(seconds=allowed), Objective(0, 1), exact=0)
    assert found.seconds <= allowed
    assert found.peak <= 1.03 * least


def test_the_cheapest_plan_weighs_wear_against_time() -> None:
    given = problem(6)
    limits = Limits(device=450)
    [fast, *_] = search(given, limits)
    [cheap, *_] = search(given, limits, Objective(time=1.0, wear=1.0))
    assert fast.written > 0
    assert cheap.written == 0  # a byte written costs as much as a second: recompute instead
    assert cheap.count("recompute") > 0


def test_with_enough_memory_everything_is_kept() -> None:
    [found, *_] = search(problem(12), Limits(device=12 * 100 + 20), exact=0)
    assert set(found.actions) == {"keep"}
    assert found.written == 0


def test_with_little_memory_the_no_block_is_recomputed_where_a_drive_hides() -> None:
    [found, *_] = search(problem(12), Limits(device=800), exact=0)
    assert found.seconds == pytest.approx(36.0)
    assert found.count("ssd") > 0
    assert found.count("recompute") == 0


def test_a_drive_too_slow_for_all_is_mixed_with_recomputation() -> None:
    [found, *_] = search(problem(12, rate=30.0), Limits(device=600), exact=0)
    [recomputed, *_] = search(
        SearchProblem([blocks(12)], one_after_the_other(), Machine(), actions_for(Machine())),
        Limits(device=600),
    )
    assert found.count("ssd") > 0
    assert found.count("recompute") > 0
    assert found.seconds < recomputed.seconds


@pytest.mark.slow
def test_a_write_budget_is_kept_to() -> None:
    given = problem(12, rate=50.0)
    [without, *_] = search(given, Limits(device=600), exact=0)
    [found, *_] = search(given, Limits(device=600, written=300), exact=0)
    assert found.written <= 300 < without.written
    assert found.seconds > without.seconds


@pytest.mark.slow
def test_the_first_tier_is_filled_up_to_its_capacity() -> None:
    tiers = (Tier("host", 500.0, 500.0, capacity=250), Tier("ssd", 30.0, 30.0))
    on = Machine(tiers, Link(500.0, 500.0), window=200, in_flight=200, prefetch=200)
    given = SearchProblem([blocks(12)], one_after_the_other(), on, actions_for(on))
    [found, *_] = search(given, Limits(device=600), exact=0)
    assert 0 < found.timeline.tier_peak["host"] <= 250
    assert found.written > 0


def test_a_limit_that_no_plan_can_meet_names_the_smallest_peak() -> None:
    with pytest.raises(
        NoPlan, match=r"no plan keeps to 50B on the device: the smallest peak .* is \d+B .*largest block"
    ) as caught:
        search(problem(6), Limits(device=50))
    assert caught.value.smallest.peak > 50


def test_runners_up_differ_in_their_actions_and_come_in_order() -> None:
    found = search(problem(6), Limits(device=450))
    assert len(found) == 4
    assert len({tuple(sorted(plan.actions)) for plan in found}) == 4
    assert [plan.seconds for plan in found] == sorted(plan.seconds for plan in found)


def test_few_simulations_find_nearly_the_best_plan_of_ninety_six_layers() -> None:
    """With all of its simulations the search finds 343 s."""
    [found, *_] = search(problem(96, rate=30.0, inputs=20), Limits(device=2500), effort=0.1)
    assert found.peak <= 2500
    assert found.seconds <= 1.01 * 343


def test_what_is_known_of_a_similar_problem_is_tried_first() -> None:
    limits = Limits(device=3 * 100 + 20)
    [best, *_] = search(problem(8), limits, effort=0.01)
    faster = problem(8, rate=110.0)
    [found] = search(faster, limits, exact=0, effort=0.0, runners_up=0, known=best.actions)
    assert found.seconds <= best.seconds
    search(problem(8), limits, effort=0.0, known=["host"] * 8)  # which it does not have


@pytest.mark.slow
def test_ninety_six_layers_take_a_bounded_number_of_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def counted(*arguments: object, **more: int) -> object:
        next(calls)
        return simulate(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("ssdtrain.planner.plans.simulate", counted)
    [found, *_] = search(problem(96, rate=30.0), Limits(device=2500))
    assert found.peak <= 2500
    assert next(calls) < 3500
