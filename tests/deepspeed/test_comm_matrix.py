"""Every layout with compressed collectives: the identity codec changes no bit, a lossy one leaves replicas equal and sends
less."""

from __future__ import annotations

import pytest

from tests.deepspeed.conftest import Results
from tests.deepspeed.rows import ROWS, Row
from tests.deepspeed.test_matrix import parameters

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900), pytest.mark.xdist_group("deepspeed rows")]

SEVERAL = [row for row in ROWS if row.ranks > 1]


def replicas(row: Row, results: list[dict]) -> list[list[dict]]:
    """Ranks that hold the same parameters."""
    if row.kind == "gpt" and "tensor_parallel" not in row.config:
        return [results]
    if row.kind == "pipeline":
        share = row.ranks // row.stages
        return [results[stage * share : (stage + 1) * share] for stage in range(row.stages)]
    return [[result] for result in results]


@pytest.mark.parametrize("row", parameters(SEVERAL))
def test_the_identity_codec_changes_no_bit(row: Row, results: Results) -> None:
    for result in results(row):
        plain, identity = result["plain"], result["identity"]
        assert identity["losses"] == plain["losses"]
        assert identity["parameters"] == plain["parameters"]
    if row.kind != "dualpipev":  # its messages are batched past every hook; a warning says so
        assert any(
            figures["calls"] for result in results(row) for figures in result["identity"]["comm"].values()
        )


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
