"""Exact messages: bit for bit what torch's own give, fewer bytes, and right where a payload does not fit."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from ssdtrain.comm import overflow
from tests.comm import exact_ranks
from tests.comm.exact_ranks import NO_ONE
from tests.support.ranks import on_ranks
from tests.support.tiers import tiered

DTYPES = tiered([torch.bfloat16, torch.float32], quick=[torch.bfloat16])
TWO_HOPS = ["a", "a", "b", "b"]
SUMS = ("dp", "tp")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ranks", "nodes"),
    tiered([(2, None), (3, None), (4, TWO_HOPS)], quick=[(2, None)]),
    ids=["two", "three", "two hops"],
)
def test_every_message_is_that_of_torch_in_three_quarters_of_its_bytes(
    ranks: int, nodes: list[str] | None, dtype: torch.dtype
) -> None:
    bound = {torch.bfloat16: 0.77, torch.float32: 0.885}[dtype]
    for found in on_ranks(ranks, exact_ranks.every_collective, "cpu", dtype, NO_ONE, nodes=nodes):
        assert found.keys() == {"zero_gather", "ep", "tp", "dp", "pp_forward"}
        for dimension, (ratio, overflows) in found.items():
            # The order of a sum of three is the framework's.
            assert ratio == 1 if dimension in SUMS and ranks > 2 else ratio <= bound, dimension
            assert overflows == 0


@pytest.mark.parametrize("overflowing", [0, 1])
@pytest.mark.parametrize(
    ("ranks", "nodes"),
    tiered([(2, None), (3, None), (4, TWO_HOPS)], quick=[(3, None)]),
    ids=["two", "three", "two hops"],
)
def test_the_elements_of_a_rank_whose_payloads_do_not_fit_follow(
    ranks: int, nodes: list[str] | None, overflowing: int
) -> None:
    """Also where the owner's part of a gather is its place in the result. They are no more bytes than without a codec."""
    results = on_ranks(ranks, exact_ranks.every_collective, "cpu", torch.bfloat16, overflowing, nodes=nodes)
    for rank, found in enumerate(results):
        for dimension, (ratio, overflows) in found.items():
            assert ratio <= 1.0002, (rank, dimension)  # a header of 16 bytes for 64 Ki elements
            plain = dimension in SUMS and ranks > 2
            assert bool(overflows) == (rank == overflowing and not plain), (rank, dimension)


@pytest.mark.parametrize("to", [1, 2])
def test_a_payload_that_does_not_fit_concerns_its_receiver_alone(to: int) -> None:
    """Between some ranks there is no payload, whose header could tell the others: too few rows, or none."""
    assert on_ranks(3, exact_ranks.one_peer_only, "cpu", to) == [2, 0, 0]


def test_a_few_elements_that_do_not_fit_cost_their_section_and_no_rest() -> None:
    (none, ratio), (overflows, with_elements) = on_ranks(2, exact_ranks.one_section_only, "cpu")
    assert (none, overflows) == (0, 20)
    assert ratio < 0.767 and with_elements == pytest.approx(ratio + (1 - ratio) / 20, abs=1e-4)


def test_after_an_overflow_messages_of_its_kind_rest_on_both_ends() -> None:
    coded, raw = 77, 100
    steady, overflowing = on_ranks(2, exact_ranks.rests, "cpu")
    assert all(set(shares) == {coded} for shares, _ in steady.values())
    # Calls 0 and 1 overflow. Both ends act on each three calls later, for four calls: 3 to 6, and 4 to 7.
    expected = [raw, raw, coded, raw, raw, raw, raw, raw, *[coded] * 8]
    assert overflowing == dict.fromkeys(("zero_gather", "ep", "pp_forward"), (expected, 5))


def test_what_keeps_not_fitting_rests_longer_each_time() -> None:
    """As many are tried as may be under way before an overflow is known everywhere, behind rests of 4, 16 and 64."""
    for overflows, fallbacks, ratio in on_ranks(2, exact_ranks.never_fits, "cpu"):
        assert (overflows, fallbacks) == (64, 336)
        assert ratio <= 1.0002


def rested(calls: int, fits: Callable[[int], bool], under_way: int = 1) -> list[int]:
    """Numbers of the calls of a kind that are not tried, where an overflow is known after so many calls."""
    path = overflow.PayloadPath(("kind",), 0, None)
    seen = overflow.Overflows.__new__(overflow.Overflows)  # without ranks
    found: list[int] = []
    seen._overflowed, seen._settled = defaultdict(list), {}
    pending: list[int] = []
    flag = torch.ones(1, dtype=torch.uint8)
    for number in range(calls):
        if seen.rests(path, number):
            found.append(number)
        elif not fits(number):
            pending.append(number)
        while pending and pending[0] <= number - under_way + 1:
            name = overflow.PayloadName(path, pending.pop(0), "")
            seen._note(overflow.SentPayload(name, [flag], [slice(0)], lambda: flag, []), [0])
    return found


@pytest.mark.parametrize("under_way", [1, overflow.LAG])
def test_overflows_under_way_together_are_one_failure(under_way: int) -> None:
    """All of the calls that overlapped, such as microbatches of a step, once; and a call of many that never fits."""
    lag = overflow.LAG
    together = rested(1000, lambda number: number >= lag, under_way)
    assert together == list(range(lag, 2 * lag + 3))
    alone = rested(50 * 64, lambda number: number % 64 != 0, under_way)
    assert len(alone) == 50 * 4
    never = rested(100_000, lambda number: False, under_way)
    tried = sorted(set(range(100_000)) - set(never))
    assert [later - call for call, later in pairwise(tried) if later - call > lag][-9:] == [4096 + lag] * 9


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_learn_of_overflows_sooner_or_later_rest_alike(seed: int) -> None:
    """A sender at once, a receiver when as many calls are under way as may be; what decides is long ago for both."""
    draw = random.Random(seed)
    fits = [draw.random() > 0.7 for _ in range(100_000)]
    assert rested(len(fits), fits.__getitem__, 1) == rested(len(fits), fits.__getitem__, overflow.LAG)


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    tiered([(2, None), (3, None), (4, TWO_HOPS)], quick=[(2, None)]),
    ids=["two", "three", "two hops"],
)
def test_excluded_elements_travel_exactly_in_fewer_bytes(ranks: int, nodes: list[str] | None) -> None:
    results = on_ranks(ranks, exact_ranks.excluded, "cpu", NO_ONE, nodes=nodes)
    for dimension in ("dp", "zero_gather"):
        raw, exact = (sum(found[how][dimension] for found in results) for how in range(2))
        assert exact < 0.93 * raw, dimension  # the first gather of weights is in full
    assert [overflows for *_, overflows in results] == [0] * ranks


def test_excluded_elements_that_do_not_fit_follow() -> None:
    """Behind elements that are quantised, in both halves of a sum and in one message with those of other ranks that do fit."""
    (*_, first), (*_, second), (*_, third) = on_ranks(3, exact_ranks.excluded, "cpu", 1)
    assert second > 0, (first, second, third)


def test_ranks_that_wait_in_other_orders_get_what_follows_their_own_payloads() -> None:
    on_ranks(3, exact_ranks.waited_in_another_order, "cpu")
