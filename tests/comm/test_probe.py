"""What rounds of measured times decide. The last way is the plain collective."""

from __future__ import annotations

import pytest

from ssdtrain.comm.probe import BATCH, MOST_BATCHES, decide

ALL = BATCH * MOST_BATCHES


def rounds(count: int, *seconds: float) -> list[tuple[float, ...]]:
    return [seconds] * count


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((0.4, 1.0), 0),
        ((2.5, 1.0), 1),
        ((2.5, 0.4, 1.0), 1),  # the second way is the first that is faster
        ((0.4, 0.1, 1.0), 0),  # ways come in the order of preference, not of speed
        ((2.5, 2.5, 1.0), 2),
    ],
)
def test_a_factor_of_two_is_clear_after_the_first_rounds(seconds: tuple[float, ...], chosen: int) -> None:
    assert decide(rounds(BATCH, *seconds), before=0, last=False) == chosen


@pytest.mark.parametrize(("seconds", "chosen"), [((0.8, 1.0), 0), ((1.3, 1.0), 1)])
def test_a_smaller_difference_needs_more_rounds(seconds: tuple[float, ...], chosen: int) -> None:
    assert decide(rounds(BATCH, *seconds), before=0, last=False) is None
    assert decide(rounds(BATCH + 1, *seconds), before=0, last=False) == chosen


@pytest.mark.parametrize("ratio", [1.0, 1.09, 0.92])
@pytest.mark.parametrize("before", [0, 1])
def test_times_within_the_band_leave_what_stood_before(ratio: float, before: int) -> None:
    assert decide(rounds(ALL - BATCH, ratio, 1.0), before, last=False) is None
    assert decide(rounds(ALL, ratio, 1.0), before, last=True) == before


@pytest.mark.parametrize("before", [0, 1])
def test_rounds_that_contradict_each_other_leave_what_stood_before(before: int) -> None:
    """The median is far slower, and fewer than three quarters of the rounds say so."""
    mixed = [*rounds(7, 3.0, 1.0), *rounds(5, 0.5, 1.0)]
    assert decide(mixed, before, last=False) is None
    assert decide(mixed, before, last=True) == before


def test_one_outlier_changes_nothing() -> None:
    assert decide([*rounds(11, 0.6, 1.0), (50.0, 1.0)], before=1, last=False) == 0
    assert decide([*rounds(11, 1.6, 1.0), (0.01, 1.0)], before=0, last=False) == 1


def test_a_way_that_is_slower_is_never_gone_back_to() -> None:
    """The first way is clearly slower and the second is open: at the least the second, whatever stood before."""
    assert decide(rounds(ALL, 2.5, 1.0, 1.0), before=0, last=True) == 1
    assert decide(rounds(ALL, 2.5, 1.0, 1.0), before=2, last=True) == 2
