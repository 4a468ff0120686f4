"""Blocks from recorded steps, worked out by hand. Seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssdtrain.device.timestamps import HostTimestamp
from ssdtrain.planner.measured_blocks import measured_blocks, pieces
from ssdtrain.planner.spans import BlockSpan
from ssdtrain.profile.passes import RegionTimes, TapeTimes


def tape(storing: float) -> TapeTimes:
    """Two regions: the first hook waits 0.25 for a store, each spends `storing` on beginning one."""
    first = RegionTimes(100, "block.a", 1.0, 2.0, 0.25, 0.0, operator=1, storing=storing, loading=0.25)
    second = RegionTimes(50, "block.b", 2.0, 1.0, 0.0, 0.5, operator=2, storing=storing)
    return TapeTimes(0, 0, (first, second), True)


def span(storing: float) -> BlockSpan:
    """From 0: the last hook ends after 3 of computation, and one more second is computed."""
    last = 3 + 0.25 + 2 * storing
    times = tuple(HostTimestamp(when) for when in (0.0, last, last + 1))
    return BlockSpan("block", 0, 2, timestamps=times)


def test_what_a_hook_spent_on_stores_and_waits_is_no_computation_of_its_block() -> None:
    steps = [pieces(tape(storing), [span(storing)], frozenset(), 0) for storing in (0.5, 1.0, 4.0)]
    measured = [one.block for one in measured_blocks(steps, {"block": "kind"}) if one.name]
    (block,) = measured
    assert (block.forward, block.recompute, block.backward, block.storing) == (4.0, 3.0, 3.0, 2.0)
    assert (block.loading, [part.loading for part in block.parts]) == (0.25, [0.25, 0.0, 0.0])
    assert [(part.forward, part.backward, part.storing) for part in block.parts] == [
        (pytest.approx(1.0), pytest.approx(2.0), pytest.approx(1.0)),
        (pytest.approx(2.0), pytest.approx(1.0), pytest.approx(1.0)),
        (pytest.approx(1.0), 0.0, 0.0),
    ]
    assert replace(block, parts=()).storing == sum(part.storing for part in block.parts)
