"""DistributedDataParallel and FSDP2 on CUDA devices through NCCL: equal to the bit with offload, fewer bytes with compression."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.data_parallel import WAYS, WRAPPERS, compressed_and_not, offloaded_and_not
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]
NCCL = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_offload_changes_no_bit(wrapper: str) -> None:
    for results in on_ranks(2, offloaded_and_not, wrapper, backend=NCCL):
        plain = results["plain"]
        assert len(set(plain["losses"])) == len(plain["losses"])
        for way in WAYS:
            assert results[way]["losses"] == plain["losses"], way
            assert all(map(torch.equal, results[way]["weights"], plain["weights"])), way
        assert results["ssd"]["moved"] > 0 and results["host"]["moved"] > 0


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_compressed_gradients_are_fewer_bytes_and_the_same_on_all_ranks(wrapper: str) -> None:
    results = on_ranks(2, compressed_and_not, wrapper, {"preset": "safe", "exclude": ["none"]}, backend=NCCL)
    first, second = (result["comm"] for result in results)
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert all(bool(torch.isfinite(one).all()) for one in first["weights"])
    raw, wire, compressed = first["comm"]["dp"]
    assert compressed > 0 and wire < 0.6 * raw


def test_raw_collectives_of_ours_change_no_bit() -> None:
    for result in on_ranks(2, compressed_and_not, "ddp", {"dp": "raw", "dp_gather": "raw"}, backend=NCCL):
        assert result["comm"]["losses"] == result["plain"]["losses"]
        assert all(map(torch.equal, result["comm"]["weights"], result["plain"]["weights"]))
