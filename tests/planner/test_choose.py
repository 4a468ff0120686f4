"""The choice of blocks against an exhaustive search of the same cost model."""

import random
from dataclasses import replace
from itertools import product

import pytest

from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import (
    KEPT,
    Block,
    Choice,
    Link,
    Machine,
    Pass,
    Tier,
    one_after_the_other,
    one_forward_one_backward,
)
from ssdtrain.planner.plans import HIDDEN
from tests.planner.offloads import choose_offloads

SSD = Choice("ssd")


def machine(bandwidth: float, in_flight: int = 200, prefetch: int = 200) -> Machine:
    tier = Tier("ssd", bandwidth, bandwidth, depth=1 << 30)
    # The host is no faster than the device: stores have begun when it queues backward.
    return Machine((tier,), Link(500, 500), in_flight, prefetch, window=100, hook=1.0)


def blocks(count: int) -> list[Block]:
    return [Block(f"b{i}", 1.0, 2.0, 100) for i in range(count)]


def lowest_peak(count: int, on: Machine, limit: float) -> int:
    found = []
    for choices in product((KEPT, SSD), repeat=count):
        step = simulate([blocks(count)], [choices], one_after_the_other(), on, steps=2)
        if step.seconds <= limit:
            found.append(step.peak_bytes)
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_of_few_blocks_of_any_size_the_choice_is_that_of_an_exhaustive_search(seed: int) -> None:
    draw = random.Random(seed)
    made = [
        Block(
            f"b{i}",
            draw.uniform(0.5, 2),
            draw.uniform(1, 4),
            draw.choice([20, 100, 300]),
            fixed=draw.choice([0, 10]),
        )
        for i in range(6)
    ]
    rate = draw.choice([30.0, 60.0, 120.0, 300.0])
    on = Machine(
        (Tier("ssd", rate, rate, depth=1 << 30),),
        Link(500, 500),
        in_flight=400,
        prefetch=draw.choice([100, 400]),
        window=100,
    )
    order = draw.choice([one_after_the_other(), one_forward_one_backward(3, 2)])
    chosen = choose_offloads([made], order, on)
    limit = chosen.kept.seconds * (1 + HIDDEN)
    every = [simulate([made], [choices], order, on, steps=2) for choices in product((KEPT, SSD), repeat=6)]
    lowest = min(
        one.peak_bytes
        for one in every
        if one.seconds <= limit and one.written["ssd"] <= rate * chosen.kept.seconds
    )
    assert chosen.predicted.seconds <= limit
    assert chosen.predicted.peak_bytes <= 1.05 * lowest


def test_six_large_regions_on_a_drive_of_half_the_bandwidth_go_where_the_peak_sinks_most() -> None:
    """The choice in one pass over the blocks saves nothing here."""
    on = machine(50, prefetch=400)
    chosen = choose_offloads([blocks(6)], one_after_the_other(), on)
    assert chosen.predicted.peak_bytes <= 1.05 * lowest_peak(6, on, chosen.kept.seconds * (1 + HIDDEN))
    assert chosen.predicted.peak_bytes < chosen.kept.peak_bytes


def test_a_drive_is_written_no_faster_than_it_bears() -> None:
    for count in (6, 24):  # tried in all combinations, and in one pass
        on = machine(300)
        free = choose_offloads([blocks(count)], one_after_the_other(), on)
        bound = choose_offloads([blocks(count)], one_after_the_other(), on, endurance=15.0)
        assert free.predicted.written["ssd"] > 15.0 * free.predicted.seconds
        assert 0 < bound.predicted.written["ssd"] <= 15.0 * bound.predicted.seconds
        assert bound.predicted.peak_bytes > free.predicted.peak_bytes


@pytest.mark.parametrize("bandwidth", [15, 25, 40, 60, 80, 120, 300])
def test_no_other_choice_of_that_time_has_a_peak_lower_by_a_twentieth(bandwidth: float) -> None:
    on = machine(bandwidth)
    chosen = choose_offloads([blocks(8)], one_after_the_other(), on)
    limit = chosen.kept.seconds * (1 + HIDDEN)
    assert chosen.predicted.seconds <= limit
    assert chosen.predicted.peak_bytes <= 1.05 * lowest_peak(8, on, limit)


def test_what_does_not_lower_the_peak_stays() -> None:
    # Tensors never leave where the window takes them all.
    wide = Machine(machine(300).tiers, Link(500, 500), window=10_000)
    assert set(choose_offloads([blocks(4)], one_after_the_other(), wide).choices[0]) == {KEPT}


def test_a_tier_slower_than_the_model_saves_gets_blocks_all_along_forward() -> None:
    chosen = choose_offloads([blocks(16)], one_after_the_other(), machine(60))
    offloaded = [index for index, choice in enumerate(chosen.choices[0]) if choice == SSD]
    assert 4 <= len(offloaded) < 15
    assert max(offloaded) > 8


def test_a_device_budget_is_kept_at_a_cost_and_nothing_more_is_moved_than_it_needs() -> None:
    on = machine(40)
    hidden = choose_offloads([blocks(12)], one_after_the_other(), on)
    tight = choose_offloads([blocks(12)], one_after_the_other(), on, device_budget=500)
    assert hidden.predicted.peak_bytes > 500
    assert tight.predicted.peak_bytes <= 500
    assert tight.predicted.seconds > hidden.predicted.seconds
    loose = choose_offloads([blocks(12)], one_after_the_other(), on, device_budget=1000)
    assert hidden.predicted.peak_bytes <= loose.predicted.peak_bytes <= 1000
    assert loose.predicted.seconds <= hidden.predicted.seconds


def test_a_tier_that_cannot_keep_up_over_the_steps_gets_no_more_than_it_can_write() -> None:
    # Staging for everything hides each step alone; the drive would fall behind by every step.
    on = machine(5, in_flight=10_000, prefetch=10_000)
    chosen = choose_offloads([blocks(8)], one_after_the_other(), on)
    stored = sum(times.stored for times in chosen.predicted.blocks[0])
    assert stored <= 5 * chosen.predicted.seconds


def test_microbatches_that_wait_leave_more_time_for_their_transfers() -> None:
    on = machine(60, prefetch=300)
    alone = choose_offloads([blocks(6)], one_after_the_other(4), on)
    pipeline = choose_offloads([blocks(6)], one_forward_one_backward(4, 3), on)
    assert (
        pipeline.predicted.peak_bytes / pipeline.kept.peak_bytes
        < alone.predicted.peak_bytes / alone.kept.peak_bytes
    )


def with_host(bandwidth: float, capacity: int) -> Machine:
    host = Tier("host", 1e15, 1e15, depth=1 << 30, capacity=capacity)
    return replace(machine(bandwidth), tiers=(*machine(bandwidth).tiers, host))


@pytest.mark.parametrize(
    ("order", "alive"), [(one_after_the_other(), 1), (one_forward_one_backward(6, 3), 3)]
)
def test_host_memory_is_for_what_backward_needs_soonest(order: list[Pass], alive: int) -> None:
    """Of what is offloaded and written; and each microbatch that is alive has its part. The newest store, which nothing waits
    for, may go to the drive."""
    chosen = choose_offloads([blocks(24)], order, with_host(60, 300 * alive))
    pairs = zip(chosen.choices[0], chosen.predicted.blocks[0], strict=True)
    tiers = [choice.tier for choice, times in pairs if times.stored]
    assert 2 <= tiers.count("host") <= 3
    assert tiers[:-1] == sorted(tiers[:-1], reverse=True)  # "ssd" and then "host"
    assert chosen.predicted.tier_peak["host"] <= 300 * alive


def test_with_host_memory_more_leaves_and_the_drive_is_written_no_more_than_it_takes() -> None:
    order = one_after_the_other()
    alone, both = (choose_offloads([blocks(24)], order, on) for on in (machine(40), with_host(40, 600)))
    assert both.predicted.seconds <= (1 + HIDDEN) * both.kept.seconds
    assert both.predicted.written["ssd"] <= 40 * both.kept.seconds
    assert both.predicted.peak_bytes < alone.predicted.peak_bytes


def test_all_that_fits_into_host_memory_goes_there() -> None:
    chosen = choose_offloads([blocks(24)], one_after_the_other(), with_host(40, 24 * 100))
    assert chosen.predicted.written["ssd"] == 0
    assert chosen.predicted.peak_bytes <= 400


@pytest.mark.parametrize(("arena", "offloaded"), [(100, True), (400, False)])
@pytest.mark.parametrize("budget", [None, 600])
def test_what_comes_back_takes_no_more_than_what_leaves(
    arena: int, offloaded: bool, budget: int | None
) -> None:
    on = Machine((Tier("ssd", 1000.0, 1000.0),), prefetch=200, buffers=arena, buffers_stay=False)
    found = choose_offloads([blocks(5)], one_after_the_other(), on, device_budget=budget)
    assert found.kept.peak_bytes == 500
    assert any(choice != KEPT for choice in found.choices[0]) == (offloaded and budget is None)
    assert (found.predicted.peak_bytes < 500) == (offloaded and budget is None)


def test_with_host_memory_an_arena_is_no_reason_against_each_block_alone() -> None:
    tiers = Tier("ssd", 1.0, 1.0), Tier("host", 1e9, 1e9, capacity=1000)
    on = Machine(tiers, prefetch=200, buffers=150, buffers_stay=False)
    found = choose_offloads([blocks(8)], one_after_the_other(), on)
    assert Choice("host") in found.choices[0] and found.predicted.peak_bytes < 800


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_blocks_are_chosen_for_a_lower_peak_within_the_time_and_never_else(seed: int) -> None:
    draw = random.Random(seed)
    count, rate = draw.choice([3, 6, 7]), draw.choice([10.0, 20.0, 40.0, 100.0])
    made = [Block(f"b{i}", 1.0, 2.0, draw.choice([100, 200])) for i in range(count)]
    whole = Machine(
        (Tier("ssd", rate, rate, depth=1 << 30),),
        draw.choice([Link(500, 500), None]),
        in_flight=400,
        prefetch=400,
        window=400,
    )
    order = draw.choice([one_after_the_other(), one_forward_one_backward(3, 2)])
    without = choose_offloads([made], order, whole)
    found = choose_offloads([made], order, replace(whole, copies=draw.choice([200.0, 10_000.0])))
    assert found.predicted.peak_bytes <= without.predicted.peak_bytes
    assert found.predicted.seconds <= (1 + HIDDEN) * found.kept.seconds
    assert found.predicted.written["ssd"] <= rate * found.predicted.seconds
    if found.choices != without.choices:
        assert found.predicted.peak_bytes <= without.predicted.peak_bytes - 0.02 * found.kept.peak_bytes


def test_six_large_blocks_on_a_slow_drive_leave_in_parts() -> None:
    slow = replace(machine(15), window=200, prefetch=200, hook=None)
    whole = choose_offloads([blocks(6)], one_after_the_other(), slow)
    parts = choose_offloads([blocks(6)], one_after_the_other(), replace(slow, copies=10_000.0))
    assert parts.predicted.peak_bytes <= whole.predicted.peak_bytes - 100
    under = choose_offloads(
        [blocks(6)],
        one_after_the_other(),
        replace(slow, copies=10_000.0),
        device_budget=parts.predicted.peak_bytes,
    )
    assert under.predicted.peak_bytes <= parts.predicted.peak_bytes
    assert under.predicted.seconds <= (1 + HIDDEN) * under.kept.seconds


def test_fine_blocks_leave_whole() -> None:
    for bandwidth in (25, 60):
        on = machine(bandwidth)
        whole = choose_offloads([blocks(40)], one_after_the_other(), on)
        assert (
            choose_offloads([blocks(40)], one_after_the_other(), replace(on, copies=10_000.0)).choices
            == whole.choices
        )
