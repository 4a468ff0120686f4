"""Every row that trains, without and with offload: equal to the bit, nothing left, and every byte accounted for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.megatron.batches import Matrix
from tests.megatron.rows import ON_DEVICES, QUICK, ROWS, SLOW, Row
from tests.support.tiers import on_devices, tier

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
    ),
]

STEPS = 3

MATRIX = Matrix("tests.megatron.matrix", {row.name: row.world for row in ROWS}, batch=6)


def parameters(rows: list[Row]) -> list[Any]:
    return [
        pytest.param(
            row,
            id=f"{row.world}: {row.name}",
            marks=[*on_devices(row.world), *tier(row.name, QUICK, SLOW)],
        )
        for row in rows
    ]


all_rows = pytest.mark.parametrize("row", parameters(ROWS))


def runs(row: Row) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(without, with) offload, of every rank."""
    found = MATRIX.results(row.name)
    for result in found:
        yield result["plain"], result["offloaded"]


@all_rows
def test_losses_norms_and_weights_are_equal_to_the_bit(row: Row) -> None:
    with_loss = 0
    for plain, offloaded in runs(row):
        assert plain["steps"] == offloaded["steps"]
        assert plain["weights"] == offloaded["weights"]
        assert plain["auxiliary"] == offloaded["auxiliary"]
        losses = [loss for loss, _ in plain["steps"] if loss is not None]
        learned = row.steps * (2 if row.evaluated else 1)
        assert losses == [] or len(set(losses)) == learned, "the model does not learn"
        with_loss += bool(losses)
    assert with_loss == row.world // row.pp


def test_the_rows_of_the_quick_tests_are_rows() -> None:
    assert set(QUICK) | set(SLOW) <= {row.name for row in [*ROWS, *ON_DEVICES]}
    assert not set(QUICK) & set(SLOW)


@all_rows
def test_nothing_is_alive_at_the_end(row: Row) -> None:
    for _, offloaded in runs(row):
        assert (offloaded["live_regions"], offloaded["live_slots"]) == (0, 0)
        assert offloaded["counted_steps"] == row.steps


@pytest.mark.parametrize("row", parameters([row for row in ROWS if row.plan is not None]))
def test_a_plan_is_made_and_followed(row: Row) -> None:
    found = [offloaded for _, offloaded in runs(row)]
    assert any(offloaded["plans"] > 0 for offloaded in found)
    if row.recomputes:
        assert all(offloaded["recomputed"] > 0 for offloaded in found)
    if row.encodes:
        assert all(offloaded["encoded"] > 0 for offloaded in found)


@pytest.mark.parametrize("row", parameters([row for row in ROWS if row.counted]))
def test_every_byte_that_autograd_holds_is_spilled_or_kept_by_plan(row: Row) -> None:
    for plain, offloaded in runs(row):
        counted = sum(nbytes for _, _, nbytes in plain["saved"])
        assert counted > 0
        assert offloaded["saved"] == counted
        assert offloaded["spilled"] + offloaded["kept"] == counted
        assert offloaded["kept_for_want"] == 0
        if "amount" in row.offload:
            assert 0 < offloaded["kept"] < counted
        elif row.vp is None:
            assert offloaded["kept"] == 0


@pytest.mark.parametrize("row", parameters([row for row in ROWS if row.vp is not None]))
def test_with_interleaving_only_tapes_whose_backward_follows_at_once_stay(row: Row) -> None:
    for rank, (plain, offloaded) in enumerate(runs(row)):
        calls = plain["saved"]
        per_step = len(calls) // STEPS
        # The order is learned in the first step.
        at_once = [
            nbytes
            for index, (_, _, nbytes) in enumerate(calls)
            if index >= per_step and index % per_step in plain["at_once"]
        ]
        assert offloaded["kept"] == sum(at_once)
        last_stage = rank >= row.world - row.world // row.pp
        assert bool(at_once) == last_stage
