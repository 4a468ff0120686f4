"""The choice of blocks against an exhaustive search of the same cost model."""

from itertools import product

import pytest

from ssdtrain.planner.choose import SLACK, choose_offloads
from ssdtrain.planner.step import (
    KEEP,
    Block,
    Choice,
    Link,
    Machine,
    Tier,
    one_after_the_other,
    one_forward_one_backward,
)
from ssdtrain.planner.timeline import simulate

SSD = Choice("ssd")


def machine(bandwidth: float, in_flight: int = 200, prefetch: int = 200) -> Machine:
    tier = Tier("ssd", bandwidth, bandwidth, depth=1 << 30)
    return Machine((tier,), Link(500, 500), in_flight, prefetch, window=100)


def blocks(count: int) -> list[Block]:
    return [Block(f"b{i}", 1.0, 2.0, 100) for i in range(count)]


def lowest_peak(count: int, on: Machine, limit: float) -> int:
    found = []
    for choices in product((KEEP, SSD), repeat=count):
        step = simulate([blocks(count)], [choices], one_after_the_other(), on, steps=2)
        if step.seconds <= limit:
            found.append(step.peak_bytes)
    return min(found)


@pytest.mark.parametrize("bandwidth", [15, 25, 40, 60, 80, 120, 300])
def test_no_other_choice_of_that_time_has_a_peak_lower_by_a_twentieth(bandwidth: float) -> None:
    on = machine(bandwidth)
    chosen = choose_offloads([blocks(8)], one_after_the_other(), on)
    limit = chosen.kept.seconds * (1 + SLACK)
    assert chosen.predicted.seconds <= limit
    assert chosen.predicted.peak_bytes <= 1.05 * lowest_peak(8, on, limit)


def test_what_does_not_lower_the_peak_stays() -> None:
    # Tensors never leave where the window takes them all.
    wide = Machine(machine(300).tiers, Link(500, 500), window=10_000)
    assert set(choose_offloads([blocks(4)], one_after_the_other(), wide).choices[0]) == {KEEP}


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
    on = machine(60)
    alone = choose_offloads([blocks(6)], one_after_the_other(4), on)
    pipeline = choose_offloads([blocks(6)], one_forward_one_backward(4, 3), on)
    assert (
        pipeline.predicted.peak_bytes / pipeline.kept.peak_bytes
        < alone.predicted.peak_bytes / alone.kept.peak_bytes
    )
