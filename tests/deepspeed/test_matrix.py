"""The same training with and without the block, on real processes: losses and final parameters are equal to the bit, all that
can be spilled is, and nothing is left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deepspeed.conftest import Results
from tests.deepspeed.rows import QUICK, ROWS, Row
from tests.deepspeed.upstream import needs

# The first test of a group size waits for all its rows.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900), pytest.mark.xdist_group("deepspeed rows")]


def tier(row: Row) -> list[pytest.MarkDecorator]:
    if row.long:
        return [pytest.mark.long]
    return [] if row.name in QUICK else [pytest.mark.slow]


def parameters(rows: list[Row]) -> list[Any]:
    return [
        pytest.param(
            row,
            id=f"{row.ranks}-{row.name}",
            marks=[*needs(*row.needs), *tier(row)],
        )
        for row in rows
    ]


def test_the_rows_of_the_quick_tests_are_rows() -> None:
    assert set(QUICK) <= {row.name for row in ROWS if not row.long}


@pytest.mark.parametrize("row", parameters(ROWS))
def test_the_block_changes_no_bit(row: Row, results: Results) -> None:
    for result in results(row):
        plain, offloaded = result["plain"], result["offloaded"]
        assert offloaded["losses"] == plain["losses"]
        assert offloaded["parameters"] == plain["parameters"]


@pytest.mark.parametrize("row", parameters(ROWS))
def test_no_slot_and_no_region_is_left(row: Row, results: Results) -> None:
    for result in results(row):
        assert result["offloaded"]["live_slots"] == 0
        assert result["offloaded"]["offload"]["live_regions"] == 0
        assert result["offloaded"]["offload"]["in_flight_bytes"] == 0


@pytest.mark.parametrize("row", parameters([row for row in ROWS if row.resumes]))
def test_a_pipeline_resumes_exactly_with_or_without_the_block(row: Row, results: Results) -> None:
    """The checkpoint of a run with the block continues a run without it and the other way round."""
    for result in results(row):
        for mode in ("resumed-without", "resumed-with"):
            assert result[mode]["losses"] == result["plain"]["losses"]
            assert result[mode]["parameters"] == result["plain"]["parameters"]
        assert result["resumed-with"]["live_slots"] == 0


@pytest.mark.parametrize("row", parameters([row for row in ROWS if row.counted]))
def test_all_that_plain_hooks_count_is_spilled(row: Row, results: Results) -> None:
    for result in results(row):
        assert result["counted"]["parameters"] == result["plain"]["parameters"]
        found = result["offloaded"]["offload"]
        # A store that was cancelled had been asked for: its bytes were needed before they were written.
        spilled = found["offloaded_bytes"] + found["cancelled_bytes"] + found["kept_bytes"]
        assert spilled == result["counted"]["counted_bytes"] > 0
        assert found["kept_full_bytes"] == found["kept_late_bytes"] == 0
