"""Times of a model from several steps, where one of them had a pause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ssdtrain.offload import policy
from ssdtrain.planner.derating import Rates, RecentRates
from ssdtrain.planner.model.types import KEPT, Block, Machine, Tier, one_after_the_other
from ssdtrain.planner.plans import HIDDEN
from ssdtrain.planner.profile import Profile
from ssdtrain.planner.recent import RecentSteps
from ssdtrain.planner.regions import measure_by_one
from ssdtrain.profile.passes import RegionTimes, StepRecord, TapeTimes
from tests.planner.offloads import choose_offloads

FAST = Machine((Tier("tiers", 1e12, 1e12),), prefetch=1)

US = 1e-6


def forward(storing: Sequence[float], loading: Sequence[float], nbytes: int = 65536) -> TapeTimes:
    """Regions of 1 ms of computation each, and what their hooks cost, in microseconds."""
    regions = tuple(
        RegionTimes(nbytes, f"{number}", 300 * US, 700 * US, 0.0, 0.0, storing=store * US, loading=load * US)
        for number, (store, load) in enumerate(zip(storing, loading, strict=True))
    )
    return TapeTimes(0, 0, regions, True)


class Recorded(StepRecord):
    def __init__(self, *tapes: TapeTimes) -> None:
        super().__init__()
        self._tapes = tapes
        self.order = [(kind, tape.serial, tape.chunk) for tape in tapes for kind in ("forward", "backward")]

    def tapes(self) -> Sequence[TapeTimes]:
        return self._tapes


OFFLOADED = forward([0, 3, 3, 3, 3, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 0])
PAUSE = forward([0, 60_000, 3, 3, 3, 3, 3, 3], [5, 5, 5, 5, 5, 3_000, 5, 0])
UNDISTURBED = forward([0] * 8, [0] * 8)


def offloaded(profile: Profile) -> int:
    found = choose_offloads(profile.blocks, profile.order, FAST)
    return sum(choice != KEPT for choice in found.choices[0])


def test_what_the_host_spends_on_the_first_stores_is_more_than_a_step_may_lose() -> None:
    """The times of a step as recorded, of 8 regions of 64 KiB: backward, and what comes before the store, after the load. There
    was a pause while the first store began. The peak is where forward ends, and what is offloaded lowers it only if its load is
    late enough: no choice does, for the slack of 31 us."""
    seconds = [
        (519, 195, 60396, 111),
        (310, 140, 35, 164),
        (291, 176, 16, 149),
        (124, 148, 14, 155),
        (93, 189, 12, 167),
        (68, 148, 12, 172),
        (57, 212, 12, 193),
        (62, 348, 0, 0),
    ]
    blocks = [
        Block(f"{number}", one * US, other * US, 65536, storing=store * US, loading=load * US)
        for number, (one, other, store, load) in enumerate(seconds)
    ]
    kept = choose_offloads([blocks], one_after_the_other(), FAST)
    assert set(kept.choices[0]) == {KEPT}
    assert HIDDEN * kept.kept.seconds < min(store + load for _, _, store, load in seconds[:-1]) * US
    paid = choose_offloads([blocks], one_after_the_other(), FAST, slack=1.0)
    assert paid.predicted.peak_bytes < paid.kept.peak_bytes
    assert paid.choices[0][0] == KEPT  # the one with the pause


def test_one_pause_keeps_nothing_in_memory() -> None:
    before = offloaded(Profile(Recorded(OFFLOADED)))
    assert before == 6
    assert offloaded(Profile(Recorded(PAUSE))) < before  # or the test would prove nothing
    for steps in (
        [PAUSE],
        [PAUSE, UNDISTURBED],
        [PAUSE, OFFLOADED],
        [OFFLOADED, OFFLOADED, PAUSE],
        [PAUSE, UNDISTURBED, UNDISTURBED, UNDISTURBED],
    ):
        recent = RecentSteps()
        profiles = [Profile(Recorded(one), recent) for one in steps]
        assert offloaded(profiles[-1]) == before
        assert profiles[-1].steps == min(3, len(steps))


def test_what_costs_more_than_it_may_is_known_to_do_so_while_it_is_kept() -> None:
    dear = forward([0, 3, 3, 3, 900, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 0])
    recent = RecentSteps()
    for _ in range(3):
        Profile(Recorded(dear), recent)
    for _ in range(20):
        profile = Profile(Recorded(UNDISTURBED), recent)
    (blocks,) = profile.blocks
    assert blocks[3].storing == 900 * US  # a store begins in the hook of what is saved next
    assert choose_offloads(profile.blocks, profile.order, FAST).choices[0][3] == KEPT


def test_a_pause_of_the_computation_is_no_time_of_the_model() -> None:
    paused = UNDISTURBED._replace(
        regions=(UNDISTURBED.regions[0]._replace(forward=1.0, backward=2.0), *UNDISTURBED.regions[1:])
    )
    recent = RecentSteps()
    assert Profile(Recorded(paused), recent).blocks[0][0].forward == 1.0
    for _ in range(2):
        (blocks,) = Profile(Recorded(UNDISTURBED), recent).blocks
        assert (blocks[0].forward, blocks[0].backward) == (300 * US, 700 * US)
    within = Profile(Recorded(UNDISTURBED, paused, UNDISTURBED), RecentSteps())  # microbatches
    assert within.blocks[0][0].forward == 300 * US and within.steps == 1


def test_one_region_is_written_in_any_case() -> None:
    host = policy.Action(True, tier="host")
    ssd = policy.Action(True, tier="ssd")

    def written(plan: list[policy.Action], movable: Sequence[int], both: bool) -> dict[int, policy.Action]:
        made = list(plan)
        measure_by_one(made, movable, both=both)
        return {index: one for index, one in enumerate(made) if one != plan[index]}

    kept = [policy.KEEP, policy.KEEP, policy.KEEP]
    assert written([*kept], [1, 2], both=False) == {1: policy.OFFLOAD._replace(must_write=True)}
    assert written([*kept], [1, 2], both=True) == {1: ssd._replace(must_write=True)}
    assert written([policy.KEEP, host, ssd], [0, 1, 2], both=True) == {2: ssd._replace(must_write=True)}
    part = policy.OFFLOAD._replace(part=0.5)
    assert written([policy.KEEP, part, policy.OFFLOAD], [0, 1, 2], both=False) == {
        1: part._replace(must_write=True)
    }
    assert written([*kept], [], both=False) == {}


@pytest.mark.parametrize("each", [1, 2, 4])
def test_stores_cost_what_was_measured_however_many_regions_an_operator_saves(each: int) -> None:
    """All that an operator saved is stored in one hook. Of what stays nothing is."""
    spent = forward([12 if place and place % each == 0 else 0 for place in range(16)], [5] * 15 + [0])
    regions = tuple(one._replace(operator=place // each) for place, one in enumerate(spent.regions))
    recent = RecentSteps()
    for _ in range(3):
        (blocks,) = Profile(Recorded(spent._replace(regions=regions)), recent).blocks
        assert sum(part.storing for block in blocks for part in block.parts or [block]) == pytest.approx(
            12 * US * (16 // each - 1)
        )
    kept = tuple(one._replace(stays=True, storing=0.0, loading=0.0) for one in regions[:8])
    recent = RecentSteps()
    tape = spent._replace(regions=(*kept, *regions[8:]))
    recent.add([tape])
    costs = recent.typical(tape).regions
    assert [one.loading for one in costs] == [one.loading for one in tape.regions[:15]] + [5 * US]
    assert not any(one.storing for one in costs[:8])


def test_steps_of_another_size_do_not_count() -> None:
    long = forward([0, 9, 9], [9, 9, 9], nbytes=1 << 20)
    recent = RecentSteps()
    Profile(Recorded(OFFLOADED), recent)
    profile = Profile(Recorded(long), recent)
    assert profile.steps == 1 and [block.saved for block in profile.blocks[0]] == [1 << 20] * 3
    assert [block.storing for block in profile.blocks[0]] == [9 * US, 9 * US, 0.0]
    assert Profile(Recorded(OFFLOADED), recent).steps == 2


def test_bandwidths_are_medians_and_of_the_largest_region_that_is_needed_late() -> None:
    recent = RecentRates()
    steps = [Rates(1e9, 2e9), Rates(1e7, None), Rates(1.1e9, None), Rates(1e7, None), Rates(2e7, None)]
    found = [recent.with_step(one) for one in steps]
    assert [one.write for one in found] == [1e9, 1e9, 1e9, 1e7, 2e7]
    assert [one.read for one in found] == pytest.approx([2e9, 2e9, 2e9, 2e7, 4e7])
    sizes = [1, 4, 4, 2, 8, 16]
    regions = tuple(
        one._replace(nbytes=size << 20, stays=place == 1)
        for place, (one, size) in enumerate(zip(OFFLOADED.regions, sizes, strict=False))
    )
    assert Profile(Recorded(OFFLOADED._replace(regions=regions))).movable == [2, 0, 5, 4, 3]


def test_reads_that_were_not_measured_are_as_much_faster_as_writes() -> None:
    before = Rates(1e9, 2e9)
    assert Rates(5e9, None).after(before) == Rates(5e9, 1e10)
    assert Rates(5e9, 3e9).after(before) == Rates(5e9, 3e9)
    assert Rates(None, None).after(before) == before
    assert Rates(5e9, None).after(Rates(None, None)) == Rates(5e9, None)
