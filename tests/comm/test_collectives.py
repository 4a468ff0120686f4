"""Compressed collectives against gloo's own, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ssdtrain.comm import Bucket, Communicator, Policy
from ssdtrain.config import load_config
from tests.support.ranks import on_ranks
from tests.support.tiers import tiered

SIZES = (1, 255, 1000, 70_003, 300_000)


def make(**comm: Any) -> Communicator:
    config = load_config({"comm": {"min_bytes": 0, "warmup_steps": 0, "probe": False, **comm}}).comm
    return Communicator(Policy.from_config(config))


def values(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(size, generator=generator).to(dtype)


def summed(
    rank: int, codec: str, gather: str, sizes: tuple[int, ...], dtype: torch.dtype, extra: dict[str, Any]
) -> list[Any]:
    comm = make(dp=codec, dp_gather=gather, **extra)
    found = []
    for size in sizes:
        mine = values(rank, size, dtype)
        exact = mine.float().clone()
        dist.all_reduce(exact)
        if (work := comm.all_reduce(mine, "dp")) is None:
            assert size < 1000  # where a header outweighs what is saved
            dist.all_reduce(mine)
        else:
            work.wait()
        error = (mine.float() - exact).norm() / exact.norm()
        found.append((error.item(), mine))
    return [found, comm.metrics()["dp"]]


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    tiered(
        [
            (2, None),
            (3, None),
            (4, ["a", "a", "b", "b"]),
            (4, ["a", "b", "a", "b"]),
            (4, ["a", "a", "a", "b"]),
        ],
        quick=[(2, None), (4, ["a", "a", "b", "b"])],
    ),
    ids=["two", "three", "two nodes", "two nodes interleaved", "uneven nodes"],
)
@pytest.mark.parametrize(
    ("codec", "gather", "error"),
    tiered(
        [
            ("int8", "int8", 0.02),
            ("bf16", "bf16", 0.006),
            ("int8/int4:hadamard", "int8", 0.2),
            ("off", "bf16", 0.004),
        ],
        quick=[("int8", "int8", 0.02)],
    ),
)
def test_an_all_reduce_is_close_and_the_same_on_all_ranks(
    ranks: int, nodes: list[str] | None, codec: str, gather: str, error: float
) -> None:
    results = on_ranks(ranks, summed, codec, gather, SIZES, torch.float32, {"chunk": "256KiB"}, nodes=nodes)
    for n, _ in enumerate(SIZES):
        assert all(torch.equal(found[n][1], results[0][0][n][1]) for found, _ in results)
    for found, figures in results:
        assert all(lost <= error for lost, _ in found[1:]), found
        assert figures.compressed >= sum(size >= 1000 for size in SIZES)


def reduced_and_gathered(rank: int, codec: str, dtype: torch.dtype) -> None:
    comm = make(dp=codec, zero_gather=codec)
    ranks = dist.get_world_size()
    for size in (256, 1021, 50_000):
        whole = values(rank, size * ranks, dtype)
        exact = whole.float().clone()
        dist.all_reduce(exact)
        out = torch.empty(size, dtype=dtype)
        comm.reduce_scatter(out, whole, "dp").wait()
        mine = exact.view(ranks, size)[rank]
        assert (out.float() - mine).norm() <= 0.02 * mine.norm()
        shard = values(rank, size, dtype)
        plain, gathered = torch.empty(size * ranks, dtype=dtype), torch.empty(size * ranks, dtype=dtype)
        dist.all_gather_into_tensor(plain, shard)
        gathered.view(ranks, size)[rank].copy_(shard)
        comm.all_gather(gathered, gathered.view(ranks, size)[rank], "zero_gather").wait()
        assert (gathered.float() - plain.float()).norm() <= 0.02 * plain.float().norm()
        everywhere = [torch.empty_like(gathered) for _ in range(ranks)]
        dist.all_gather(everywhere, gathered)
        assert all(torch.equal(other, gathered) for other in everywhere)


@pytest.mark.parametrize("dtype", tiered([torch.float32, torch.bfloat16], quick=[torch.bfloat16]), ids=str)
@pytest.mark.parametrize("nodes", [None, ["a", "a", "b", "b"]], ids=["one node", "two nodes"])
def test_the_halves_of_an_all_reduce(dtype: torch.dtype, nodes: list[str] | None) -> None:
    on_ranks(4, reduced_and_gathered, "int8", dtype, nodes=nodes)


def excluded(rank: int) -> None:
    comm = make(dp="int4", dp_gather="int4")
    exact = ((0, 7), (1000, 1100), (4000, 4001), (9990, 10_000))
    mine = values(rank, 10_000)
    plain = mine.clone()
    dist.all_reduce(plain)
    comm.all_reduce(mine, "dp", bucket=Bucket("b", exact)).wait()
    for a, b in exact:
        assert torch.equal(mine[a:b], plain[a:b])
    assert not torch.equal(mine, plain)
    out, whole = torch.empty(5000), values(rank, 10_000)
    comm.reduce_scatter(out, whole, "dp", bucket=Bucket("c", exact)).wait()
    mine = plain.view(2, -1)[rank]
    for a, b in exact:
        a, b = (min(max(edge - 5000 * rank, 0), 5000) for edge in (a, b))
        assert torch.equal(out[a:b], mine[a:b])


def test_excluded_elements_are_summed_as_they_are() -> None:
    on_ranks(2, excluded)


def subgroups(rank: int) -> None:
    comm = make(tp="int8")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3]), dist.new_group([2])]
    group = groups[rank % 2]
    mine = values(rank, 5000)
    plain = mine.clone()
    dist.all_reduce(plain, group=group)
    comm.all_reduce(mine, "tp", group).wait()
    assert (mine - plain).norm() <= 0.02 * plain.norm()
    if rank == 2:
        assert comm.all_reduce(mine, "tp", groups[2]) is None


def test_subgroups_and_a_group_of_one() -> None:
    on_ranks(4, subgroups)


def from_outside(rank: int) -> bool:
    comm = make(tp="int8", ep="int8")
    group = dist.new_group([0, 1])
    work = comm.all_reduce(values(rank, 5000), "tp", group)
    if work is not None:
        work.wait()
    rows = values(rank, 5000).view(10, 500)
    exchange = comm.all_to_all(torch.empty_like(rows), rows, "ep", group=group)
    if exchange is not None:
        exchange.wait()
    return work is not None and exchange is not None


def test_a_rank_outside_of_the_group_leaves_the_call_to_torch() -> None:
    """Which warns and does nothing."""
    assert on_ranks(3, from_outside) == [True, True, False]


def misfits(rank: int) -> list[bool]:
    comm = make(dp="int8", zero_gather="int8", ep="int8")
    half, whole, other = torch.ones(2500), torch.ones(5000), torch.ones(2500, dtype=torch.bfloat16)
    return [
        work is None
        for work in (
            comm.reduce_scatter(torch.empty(3000), whole, "dp"),
            comm.reduce_scatter(torch.empty(2500), torch.ones(5001), "dp"),
            comm.reduce_scatter(other, whole, "dp"),
            comm.all_gather(torch.empty(5001), half, "zero_gather"),
            comm.all_gather(whole, torch.ones(2600), "zero_gather"),
            comm.all_gather(whole, other, "zero_gather"),
            comm.all_to_all(whole.to(torch.bfloat16), whole, "ep"),
        )
    ]


def test_tensors_that_do_not_fit_are_left_to_torch_which_says_so() -> None:
    """Compressed, some of their elements would not be sent, or not be written."""
    assert on_ranks(2, misfits) == [[True] * 7] * 2


def transposed(rank: int) -> None:
    comm = make(dp="bf16", dp_gather="bf16")
    mine = values(rank, 6000).view(60, 100).t()
    plain = mine.contiguous()
    dist.all_reduce(plain)
    first, second = (
        comm.all_reduce(mine, "dp", op=dist.ReduceOp.AVG),
        comm.all_reduce(other := values(rank, 100), "dp"),
    )
    # Nobody has waited yet, and both are under way.
    second.wait()
    first.wait()
    assert (mine - plain / 2).norm() <= 0.01 * plain.norm()
    assert other.shape == (100,)
    rows = values(rank, 6000).view(1500, 4)
    column = rows[:, 1]
    plain, kept = column.clone(), rows[:, 2].clone()
    dist.all_reduce(plain)
    comm.all_reduce(column, "dp").wait()
    assert (rows[:, 1] - plain).norm() <= 0.01 * plain.norm()
    assert torch.equal(rows[:, 2], kept)


def test_a_mean_of_a_tensor_that_is_not_contiguous_and_waits_in_any_order() -> None:
    on_ranks(2, transposed)


def exchanged(rank: int) -> None:
    comm = make(ep="int8")
    counts = [[3, 0, 700], [5, 11, 2], [0, 900, 4]]
    sends, receives = counts[rank], [row[rank] for row in counts]
    tokens = values(rank, 64 * sum(sends)).view(-1, 64)
    plain, out = torch.empty(sum(receives), 64), torch.empty(sum(receives), 64)
    dist.all_to_all_single(plain, tokens, receives, sends)
    comm.all_to_all(out, tokens, "ep", receives, sends).wait()
    assert (out - plain).norm() <= 0.02 * plain.norm()
    own = slice(sum(receives[:rank]), sum(receives[: rank + 1]))
    assert torch.equal(out[own], plain[own])
    strided = torch.empty(64, sum(receives)).t()
    comm.all_to_all(strided, tokens, "ep", receives, sends).wait()
    assert torch.equal(strided, out)
    figures = comm.metrics()["ep"]
    if rank == 0:  # of a rank that has no tokens for anybody
        none = torch.empty(0)
        comm.all_to_all(out, none, "ep", [0, len(out), 0], [0, 0, 0]).wait()
    else:
        comm.all_to_all(tokens[:0], tokens[: 8 * (rank == 1)], "ep", [0] * 3, [8 * (rank == 1), 0, 0]).wait()
    assert figures.raw_bytes == 2 * 64 * 4 * (sum(sends) - sends[rank])
    assert figures.wire_bytes < 0.27 * figures.raw_bytes + 320


def test_an_all_to_all_with_uneven_splits() -> None:
    on_ranks(3, exchanged)


def overflowing(rank: int, codec: str) -> None:
    comm = make(dp=codec, dp_gather=codec)
    for bad in (float("inf"), float("nan"), float("-inf")):
        mine = values(rank, 5000)
        if rank == 1:
            mine[1234] = bad
        comm.all_reduce(mine, "dp").wait()
        assert not torch.isfinite(mine[1234])


@pytest.mark.parametrize("codec", ["int8", "int4:hadamard", "fp8", "zfp:rate=16", "bf16"])
def test_an_overflow_on_one_rank_is_an_overflow_on_all(codec: str) -> None:
    on_ranks(2, overflowing, codec)


def identity(rank: int) -> None:
    comm = make(dp="raw", dp_gather="raw", tp="raw", ep="raw", zero_gather="raw", pp_forward="raw")
    # Its order of summation is the framework's, so the framework does it.
    assert comm.all_reduce(values(rank, 1000), "dp") is None
    shard, out, plain = values(rank, 1000), torch.empty(3000), torch.empty(3000)
    comm.all_gather(out, shard, "zero_gather").wait()
    dist.all_gather_into_tensor(plain, shard)
    assert torch.equal(out, plain)
    sent, received, through = values(rank, 999), torch.empty(999), torch.empty(999)
    dist.all_to_all_single(received, sent)
    comm.all_to_all(through, sent, "ep").wait()
    assert torch.equal(received, through)


def test_the_identity_codec_changes_no_bit() -> None:
    on_ranks(3, identity)


def rejected(rank: int) -> Any:
    comm = make(dp="int8", tp="off/int8", min_bytes="4KiB")
    assert comm.all_reduce(torch.ones(5000, dtype=torch.int64), "dp") is None
    assert comm.all_reduce(torch.ones(5000), "dp", op=dist.ReduceOp.MAX) is None
    assert comm.all_reduce(torch.ones(10), "dp") is None
    assert comm.all_reduce(torch.ones(5000), "tp") is None
    assert comm.all_reduce(torch.ones(5000), "ep") is None
    return {name: dict(found.fallbacks) for name, found in comm.metrics().items()}


def test_what_goes_uncompressed_says_why() -> None:
    for found in on_ranks(2, rejected):
        assert found == {
            "dp": {"dtype int64": 1, "reduction MAX": 1, "smaller than min_bytes": 1},
            "tp": {"off inside a node": 1},
            "ep": {"off in the config": 1},
        }


def disagreeing(rank: int) -> str:
    try:
        make(dp="int8" if rank else "int4")
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_mean_different_things_do_not_start() -> None:
    for found in on_ranks(3, disagreeing):
        assert "ranks [0]" in found
