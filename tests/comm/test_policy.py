"""What the config asks of each dimension, and the grid of a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ssdtrain.comm import Policy
from ssdtrain.comm.collectives import AllGather, AllReduce, ReduceScatter
from ssdtrain.comm.meter import Meter
from ssdtrain.comm.policy import PRESETS, Rule
from ssdtrain.comm.routing import op_name
from ssdtrain.comm.topology import grid_of
from ssdtrain.config import DIMENSIONS, ConfigError, load_config

KiB = 1024


def policy(**comm: Any) -> Policy:
    config = load_config({"comm": comm}).comm
    return Policy.from_config(config)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_policy_and_hashes_alike(preset: str) -> None:
    found = policy(preset=preset)
    assert set(found.rules) == set(DIMENSIONS)
    assert not found.rules["dp"].off
    assert found.digest() == policy(preset=preset).digest() != policy(preset=preset, seed=1).digest()


def test_a_dimension_of_ones_own_wins_over_the_preset() -> None:
    found = policy(preset="safe", dp="off", tp="off/int8@64KiB", min_bytes="2MiB")
    assert found.rules["dp"] == Rule("off", "off", 2048 * KiB)
    assert found.rules["tp"] == Rule("off", "int8", 64 * KiB)
    assert found.rules["dp_gather"].inside == "int8"


@pytest.mark.parametrize(
    ("comm", "key"),
    [
        ({"dp": "int5"}, "ssdtrain.comm.dp"),
        ({"tp": "lossless"}, "ssdtrain.comm.tp"),
        ({"dp": "int8/int9"}, "ssdtrain.comm.dp"),
        ({"ep": "int8@lots"}, "ssdtrain.comm.ep"),
        ({"preset": "safe", "adapt": 0.1}, "ssdtrain.comm.adapt"),
    ],
)
def test_what_cannot_be_is_rejected_with_its_key(comm: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        policy(**comm)
    assert error.value.problems[0].path == key


def test_few_bits_begin_after_the_warm_up() -> None:
    found = policy(preset="aggressive", warmup_steps=10)
    assert found.codec("int4:hadamard", 9).spec.startswith("int8")
    assert found.codec("int4:hadamard", 10).spec.startswith("int4")
    assert found.codec("bf16", 0).spec == "bf16"
    assert found.codec("off", 0) is None


@pytest.mark.parametrize(
    ("nodes", "grid"),
    [
        ("aaa", ((0, 1, 2),)),
        ("abc", ((0,), (1,), (2,))),
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("aaab", None),
        ("abba", ((0, 3), (1, 2))),
    ],
)
def test_the_grid_of_a_group(nodes: str, grid: tuple[tuple[int, ...], ...] | None) -> None:
    found = grid_of(list(nodes), True)
    # A subgroup holds its ranks in ascending order, so a grid whose columns do not is none.
    columns_ascend = grid is not None and all(list(c) == sorted(c) for c in zip(*grid, strict=True))
    assert found == (grid if columns_ascend else None)
    one_hop = grid_of(list(nodes), False)
    assert sorted(sum(one_hop, ())) == list(range(len(nodes)))


def test_ring_bytes_and_the_meters_account_of_a_fallback() -> None:
    assert [kind.ring_bytes(1200, 4) for kind in (AllReduce, ReduceScatter, AllGather)] == [1800, 900, 900]
    meter = Meter()
    assert meter.count_fallback("dp", "why", 100)
    assert not meter.count_fallback("dp", "why", 100)
    figures = meter.snapshot()["dp"]
    assert (figures.calls, figures.raw_bytes, figures.wire_bytes, figures.ratio) == (2, 200, 200, 1.0)
    assert dict(figures.fallbacks) == {"why": 2}
    meter.count_fallback("dp", "why", 1)
    assert figures.calls == 2  # a snapshot stays as it was


def test_reductions_have_names_and_no_addresses() -> None:
    """Each is a reason that is given once."""
    assert op_name(dist.ReduceOp.AVG) == "AVG"
    assert op_name(dist.ReduceOp(dist.ReduceOp.SUM)) == "SUM"
    assert op_name(SimpleNamespace(op=dist.ReduceOp.RedOpType.PREMUL_SUM)) == "PREMUL_SUM"
    if hasattr(dist, "_make_nccl_premul_sum"):  # of builds with NCCL
        assert op_name(dist._make_nccl_premul_sum(0.5)) == "PREMUL_SUM"


def test_a_torch_that_cannot_replace_the_reduction_of_fully_shard_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ssdtrain.pytorch import fsdp

    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter", raising=False)
    with pytest.raises(ValueError, match=r"torch 2\.9 or newer, and this is"):
        fsdp.attach(nn.Linear(2, 2), None, bool)
