"""Exact messages on CUDA devices through NCCL, where the host reads flags."""

from __future__ import annotations

import pytest
import torch

from tests.comm import exact_ranks
from tests.comm.exact_ranks import NO_ONE
from tests.cuda.data_parallel import compressed_and_not
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]
NCCL = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("overflowing", [NO_ONE, 1])
@pytest.mark.parametrize("backend", [NCCL, "nccl"])
def test_every_message_is_that_of_torch(overflowing: int, backend: str) -> None:
    results = on_ranks(2, exact_ranks.every_collective, "cuda", torch.bfloat16, overflowing, backend=backend)
    for rank, found in enumerate(results):
        assert found.keys() == {"zero_gather", "ep", "tp", "dp", "pp_forward"}
        for ratio, overflows in found.values():
            assert bool(overflows) == (rank == overflowing)
            assert ratio <= (1.0002 if overflows else 0.77)


def test_a_payload_that_does_not_fit_concerns_its_receiver_alone() -> None:
    assert on_ranks(3, exact_ranks.one_peer_only, "cuda", 2, backend=NCCL) == [2, 0, 0]


def test_after_an_overflow_messages_of_its_kind_rest_on_both_ends() -> None:
    steady, overflowing = on_ranks(2, exact_ranks.rests, "cuda", backend=NCCL)
    assert all(set(shares) == {77} for shares, _ in steady.values())
    expected = [100, 100, 77, *[100] * 5, *[77] * 8], 5
    assert all(found == expected for found in overflowing.values())


@pytest.mark.parametrize("overflowing", [NO_ONE, 1])
def test_excluded_elements_travel_exactly(overflowing: int) -> None:
    """The sums of a rank whose elements do not fit do not fit either."""
    results = on_ranks(2, exact_ranks.excluded, "cuda", overflowing, backend=NCCL)
    for raw, exact, overflows in results:
        assert bool(overflows) == (overflowing != NO_ONE)
        assert overflows or exact["dp"] < raw["dp"]


def test_ranks_that_wait_in_other_orders_get_what_follows_their_own_payloads() -> None:
    on_ranks(2, exact_ranks.waited_in_another_order, "cuda", backend=NCCL)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp bf16"])
def test_data_parallel_training_changes_no_bit(wrapper: str) -> None:
    dimensions = {"dp"} if wrapper == "ddp" else {"dp", "zero_gather"}
    for result in on_ranks(2, compressed_and_not, wrapper, {"preset": "exact"}, backend=NCCL):
        assert result["comm"]["losses"] == result["plain"]["losses"]
        assert all(map(torch.equal, result["comm"]["weights"], result["plain"]["weights"]))
        assert result["comm"]["comm"].keys() == dimensions
        for dimension, (raw, wire, compressed) in result["comm"]["comm"].items():
            averaged = wrapper != "ddp" and dimension == "dp"  # FSDP2 sums with a factor
            assert averaged or (compressed > 0 and wire < raw), dimension
