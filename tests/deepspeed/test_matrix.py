"""The same training with and without the block, on real processes: losses and final parameters are equal to the bit, all that
can be spilled is, and nothing is left. With compressed collectives the exact codec changes no bit, and a lossy one leaves
replicas equal; both send less.

One file, because one worker of xdist runs a file, and the processes of these tests are started once.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.deepspeed.conftest import Results
from tests.deepspeed.rows import QUICK, ROWS, SLOW, Row
from tests.deepspeed.upstream import needs
from tests.support.tiers import on_devices, tier

# The first test of a group size waits for all its rows.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def parameters(rows: list[Row]) -> list[Any]:
    return [
        pytest.param(
            row,
            id=f"{row.ranks}-{row.name}",
            marks=[*needs(*row.needs), *on_devices(row.ranks), *tier(row.name, QUICK, SLOW)],
        )
        for row in rows
    ]


def test_the_rows_of_the_quick_tests_are_rows() -> None:
    assert {*QUICK, *SLOW} <= {row.name for row in ROWS}


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


@pytest.mark.parametrize("row", parameters([row for row in ROWS if row.name == "pipeline2"]))
def test_of_two_stages_the_first_leaves_memory_and_the_last_stays(row: Row, results: Results) -> None:
    first, last = (result["offloaded"]["offload"] for result in results(row))
    assert first["kept_bytes"] == 0
    assert first["offloaded_bytes"] + first["avoided_write_bytes"] > 0
    assert last["offloaded_bytes"] == last["avoided_write_bytes"] == 0
    assert last["kept_bytes"] > 0


@pytest.mark.parametrize("row", parameters([row for row in ROWS if row.counted]))
def test_all_that_plain_hooks_count_is_spilled(row: Row, results: Results) -> None:
    for result in results(row):
        assert result["counted"]["parameters"] == result["plain"]["parameters"]
        found = result["offloaded"]["offload"]
        # A store that was cancelled had been asked for: its bytes were needed before they were written.
        spilled = found["offloaded_bytes"] + found["avoided_write_bytes"] + found["kept_bytes"]
        assert spilled == result["counted"]["counted_bytes"] > 0
        assert found["kept_full_bytes"] == found["kept_late_bytes"] == 0


@pytest.mark.parametrize("row", parameters([row for row in ROWS if row.plan is not None]))
def test_a_plan_is_made_and_followed(row: Row, results: Results) -> None:
    found = [result["offloaded"] for result in results(row)]
    assert any(result["plans"] > 0 for result in found)
    if row.recomputes:
        every = any if "device_limit" in row.plan else all  # of two stages one may fit as it is
        assert every(result["recomputed"] > 0 for result in found)


SEVERAL = [row for row in ROWS if row.ranks > 1 and row.compressed]


def replicas(row: Row, results: list[dict]) -> list[list[dict]]:
    """Ranks that hold the same parameters."""
    if row.kind == "gpt" and "tensor_parallel" not in row.config:
        return [results]
    if row.kind == "pipeline":
        share = row.ranks // row.stages
        return [results[stage * share : (stage + 1) * share] for stage in range(row.stages)]
    return [[result] for result in results]


@pytest.mark.parametrize("row", parameters(SEVERAL))
def test_the_exact_codec_changes_no_bit_and_sends_less(row: Row, results: Results) -> None:
    smaller = 0
    for result in results(row):
        plain, exact = result["plain"], result["exact"]
        assert exact["losses"] == plain["losses"]
        assert exact["parameters"] == plain["parameters"]
        for dimension, figures in exact["comm"].items():
            smaller += figures["wire_bytes"] < figures["raw_bytes"]
            # In this small model tensors of unlike size share blocks, and some gradients do not fit.
            assert figures["wire_bytes"] <= figures["raw_bytes"] or figures["overflows"], dimension
    # Messages of DualPipeV are batched past every hook, and float16 does not shrink.
    assert smaller or row.kind == "dualpipev" or "fp16" in row.config


@pytest.mark.parametrize("row", parameters(SEVERAL))
def test_a_lossy_codec_sends_less_and_leaves_replicas_equal(row: Row, results: Results) -> None:
    found = results(row)
    for group in replicas(row, found):
        assert len({result["compressed"]["parameters"] for result in group}) == 1
    if row.tied:
        assert len({result["compressed"]["tied"] for result in found}) == 1
    everything = [figures for result in found for figures in result["compressed"]["comm"].values()]
    assert any(figures["compressed"] for figures in everything) or row.kind == "dualpipev"
    for result in found:
        compressed = result["compressed"]
        assert compressed["finite"]
        for dimension, figures in compressed["comm"].items():
            if figures["compressed"]:
                assert figures["wire_bytes"] < figures["raw_bytes"], dimension
