"""What the interface between two nodes counts: a compressed call never sends more than the plain one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from benchmarks.two_nodes.network import Network, network, why_not
from benchmarks.two_nodes.ranks import Ranks
from tests.comm.interface_ranks import DTYPES, EXCLUDED, KINDS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

# Acknowledgements and headers of small packets vary with timing.
NOISE = 0.03


@pytest.fixture(scope="module")
def nodes() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network(2, "10gbit") as made:
        yield made


def _sent(nodes: Network, ranks: Ranks, command: str) -> list[int]:
    """Bytes that each node sends; a busy machine also sends some packets again."""
    before = nodes.counters()
    ranks.tell(command)
    return [b["sent"] - a["sent"] for a, b in zip(before, nodes.counters(), strict=True)]


@pytest.mark.slow
def test_no_compressed_call_puts_more_on_the_wire_than_the_plain_one(nodes: Network) -> None:
    ratios = {}
    with Ranks(["-m", "tests.comm.interface_ranks"], 2, nodes, timeout=120) as ranks:
        ranks.tell("ready")
        for kind, dtype, excluded in itertools.product(KINDS, DTYPES, EXCLUDED):
            sent = {}
            for way in ("plain", "compressed"):
                command = f"{kind} {dtype} {excluded} {way}"
                ranks.tell(command)  # the first gather of weights is in full
                sent[way] = [
                    min(found)
                    for found in zip(*(_sent(nodes, ranks, command) for _ in range(3)), strict=True)
                ]
            ratios[kind, dtype, excluded] = [
                one / other for one, other in zip(sent["compressed"], sent["plain"], strict=True)
            ]
        ranks.finish()
    assert {case: found for case, found in ratios.items() if max(found) > 1 + NOISE} == {}
    for kind, dtype in itertools.product(KINDS, DTYPES):
        assert max(ratios[kind, dtype, "none"]) < (0.3 if dtype == "float32" else 0.56), (kind, dtype)
    # The rank whose shard is all table sends it as it is, the other its compressed part.
    table = ratios["weights", "bfloat16", "table"]
    assert min(table) < 0.7 < max(table) <= 1 + NOISE
