"""Published figures beside what the planner computes: the page is what the command writes, and differences stay what they are."""

from pathlib import Path

import pytest

from benchmarks.papers.__main__ import Compared, compare, page, written
from benchmarks.papers.families import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "clusters.md"


@pytest.fixture(scope="module")
def found() -> list[Compared]:
    return compare()


def test_the_page_holds_what_the_command_writes(found: list[Compared]) -> None:
    text = PAGE.read_text()
    assert page(found) in text, "python -m benchmarks.papers --write docs/clusters.md"
    assert written(text, page(found)) == text


def test_ratios_stay_within_the_bounds_of_their_family(found: list[Compared]) -> None:
    for name, family in FAMILIES.items():
        ratios = {
            one.row.what: one.ratio for one in found if one.row.family == name and one.ratio is not None
        }
        assert ratios
        low, high = family.bounds
        outside = {what: ratio for what, ratio in ratios.items() if not low <= ratio <= high}
        assert not outside, f"{name}: {outside}"


def test_what_has_no_plan_is_said_so(found: list[Compared]) -> None:
    assert not [one.row.what for one in found if one.computed is None]
    without = Compared(found[0].row, None)
    assert without.far
    assert "| no plan | - | yes |" in page([without])


def test_a_ratio_to_a_range_is_to_its_nearest_end(found: list[Compared]) -> None:
    row = next(one.row for one in found if (one.row.low, one.row.high) == (28, 40))
    assert row.ratio(14) == pytest.approx(0.5)
    assert row.ratio(34) == 1
    assert row.ratio(60) == pytest.approx(1.5)
