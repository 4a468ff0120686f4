"""The benchmark of what drives get with the codec `exact`: two runs in a framework, begun at once."""

from __future__ import annotations

import pytest

from benchmarks.spill_exact import SPILLED, in_framework


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SPILLED)
def test_drives_get_three_quarters_and_bits_are_equal(name: str) -> None:
    row = in_framework(SPILLED[name], 1)
    assert row["bits_equal"] and row["offloaded_bytes"] > 0
    assert row["drive_bytes_ratio"] <= 0.77
