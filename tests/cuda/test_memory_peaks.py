"""The allocator's peaks of 24 layers on the device, allocated and reserved, against those of keeping everything."""

from __future__ import annotations

import pytest

from benchmarks.emulated_device import GOALS, measured

SHAPE = {"layers": 24, "hidden": 64, "heads": 4, "sequence": 256, "batch": 8, "vocabulary": 256}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_of_24_layers_less_than_a_third_is_on_the_device(kind: str) -> None:
    row = measured(kind, "plain", SHAPE, timeout=560)
    assert row["bits_equal"]
    assert row["host_syncs"] == 0 and row["pageable_copies"] == 0
    assert {name: row[name] for name in GOALS if row[name] > GOALS[name]} == {}
