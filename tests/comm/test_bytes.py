"""No message is larger than the one it replaces: what the meter says, what is handed to torch, and what the interface counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ssdtrain.comm import Bucket, CommMetrics, Communicator, algorithms, references
from ssdtrain.comm.collectives import AllGather, AllReduce
from tests.comm.test_collectives import make, values
from tests.support.ranks import on_ranks
from tests.support.tiers import tiered

CASES = 30
SPECS = ("int8", "int4:hadamard", "bf16", "off/int8", "int8/int4", "zfp:rate=16", "raw", "int8/off", "exact")
WAYS = (*((spec, "raw") for spec in SPECS), ("int8", "exact"), ("off/int4", "exact"))
"""Codecs, and how excluded elements are sent."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def waited(work: Any) -> bool:
    """Wait for a call, unless it is sent uncompressed."""
    return work is not None and work.wait()


def ranges(chance: random.Random, numel: int) -> tuple[tuple[int, int], ...]:
    """Excluded elements: none, few, one large table at either end, nearly all, all."""
    kind = chance.randrange(6)
    if kind == 0 or numel == 0:
        return ()
    if kind == 1:
        return ((0, numel),)
    if kind == 2:
        return ((0, max(1, numel * 2 // 3)),)
    if kind == 3:
        return ((numel // 3, numel),)
    if kind == 4 and numel > 4:
        return ((0, numel // 2), (numel // 2 + 1, numel))
    edges = sorted({chance.randrange(numel + 1) for _ in range(2 * chance.randrange(1, 5))})
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=False))


@contextmanager
def handed_over(sent: list[int]) -> Iterator[None]:
    """Counts in `sent` what is handed to torch for other ranks while it lives: all of it, and what is there to agree."""
    exchange, gather = algorithms._all_to_all, algorithms.plain_all_gather

    def all_to_all(out: Any, packed: Any, receives: Any, sends: Any, **more: Any) -> Any:
        sent[0] += packed.nbytes
        return exchange(out, packed, receives, sends, **more)

    def all_gather(out: Any, mine: Any, **more: Any) -> Any:
        sent[0] += out.nbytes - mine.nbytes
        return gather(out, mine, **more)

    def all_reduce(tensor: Any, **more: Any) -> Any:
        bytes_of_ring = AllReduce.ring_bytes(tensor.nbytes, dist.get_world_size(more["group"]))
        sent[0] += bytes_of_ring
        sent[1] += bytes_of_ring
        return agree(tensor, **more)

    agree = references._all_reduce
    algorithms._all_to_all, algorithms.plain_all_gather = all_to_all, all_gather
    references._all_reduce = all_reduce
    try:
        yield
    finally:
        algorithms._all_to_all, algorithms.plain_all_gather = exchange, gather
        references._all_reduce = agree


def one_case(comm: Communicator, number: int, rank: int) -> None:
    """A call with random sizes, the same on all ranks, and its result beside that of the plain collective."""
    chance = random.Random(number)
    ranks = dist.get_world_size()
    dtype = chance.choice(DTYPES)
    share = chance.choice((1, 3, 40, 255, 1000, 20_001))
    kind = chance.choice(("all_reduce", "reduce_scatter", "all_gather", "weights", "all_to_all"))
    bucket = Bucket(f"b{number}", ranges(chance, share * ranks))
    own = slice(rank * share, (rank + 1) * share)
    whole = values(rank + number, share * ranks, dtype)
    if kind == "all_reduce":
        waited(comm.all_reduce(whole.clone(), "dp", bucket=bucket))
    elif kind == "reduce_scatter":
        waited(comm.reduce_scatter(torch.empty(share, dtype=dtype), whole, "dp", bucket=bucket))
    elif kind == "all_gather":
        waited(comm.all_gather(whole, whole[own].clone(), "zero_gather", bucket=bucket))
    elif kind == "all_to_all":
        counts = [[chance.randrange(0, 90) for _ in range(ranks)] for _ in range(ranks)]
        sends, receives = counts[rank], [row[rank] for row in counts]
        tokens = values(rank, 5 * sum(sends), dtype).view(-1, 5)
        out = torch.empty(sum(receives), 5, dtype=dtype)
        waited(comm.all_to_all(out, tokens, "ep", receives, sends))
    else:
        replica = torch.zeros(share * ranks, dtype=dtype)
        for step in range(3):
            mine = values(rank + 7 * step, share, dtype)
            plain = torch.empty_like(replica)
            dist.all_gather_into_tensor(plain, mine)
            replica[own] = mine
            if not waited(comm.gather_weights(replica, replica[own], None, bucket)):
                replica.copy_(plain)
            for a, b in bucket.uncompressed_ranges:
                assert torch.equal(replica[a:b], plain[a:b]), "excluded weights come as they are"


def cases(rank: int, seed: int) -> int:
    compressed = 0
    for spec, how in WAYS:
        codecs = dict.fromkeys(("dp", "dp_gather", "zero_gather", "ep"), spec)
        comm = make(**codecs, chunk="16KiB", excluded=how)
        for number in range(seed, seed + CASES):
            before, sent = comm.metrics(), [0, 0]
            with handed_over(sent):
                one_case(comm, number, rank)
            for dimension, after in comm.metrics().items():
                earlier = before.get(dimension, CommMetrics())
                raw, wire = after.raw_bytes - earlier.raw_bytes, after.wire_bytes - earlier.wire_bytes
                assert wire - sent[1] <= raw, (number, spec, dimension, wire, raw)
                if raw and after.fallbacks == earlier.fallbacks:
                    assert wire == sent[0], (number, spec, dimension)
        compressed += sum(found.compressed for found in comm.metrics().values())
    return compressed


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    tiered([(2, ["a", "b"]), (3, None), (4, ["a", "a", "b", "b"])], quick=[(2, ["a", "b"])]),
    ids=["two nodes", "three ranks", "two hops"],
)
def test_no_call_sends_more_than_a_ring(ranks: int, nodes: list[str] | None) -> None:
    assert min(on_ranks(ranks, cases, 1000 * ranks, nodes=nodes)) > CASES


def large_vocabulary(rank: int, dtype: torch.dtype) -> Any:
    """A table of 16384 x 128 in 3.3 M parameters: it is excluded, and fills the first of two shards."""
    comm = make(zero_gather="int8")
    numel, table = 3_300_352, 16384 * 128
    ranks = dist.get_world_size()
    share = numel // ranks
    replica = torch.zeros(numel, dtype=dtype)
    own = slice(rank * share, (rank + 1) * share)
    bucket = Bucket("weights", ((0, table),))
    for step in range(3):
        replica[own] += 0.01 * values(10 * step + rank, share, dtype)
        if not waited(comm.gather_weights(replica, replica[own], None, bucket)):
            dist.all_gather_into_tensor(replica, replica[own].clone())
    found = comm.metrics()["zero_gather"]
    # The first gather is in full.
    plain = AllGather.ring_bytes(replica.nbytes, ranks)
    return [found.raw_bytes - plain, found.wire_bytes - plain, found.compressed]


def updates(rank: int, share: int) -> Any:
    """Weights gathered in three steps: calls that were compressed, and bytes beyond the plain ones and the payloads."""
    comm, sent = make(zero_gather="int4:block=128,hadamard"), [0, 0]
    replica = torch.zeros(4 * share, dtype=torch.bfloat16)
    own = slice(rank * share, (rank + 1) * share)
    for step in range(3):
        replica[own] = values(rank + 7 * step, share, torch.bfloat16)
        with handed_over(sent):
            work = comm.gather_weights(replica, replica[own], None, Bucket("weights"))
        if not waited(work):
            dist.all_gather_into_tensor(replica, replica[own].clone())
        comm.step_end()
    found = comm.metrics()["zero_gather"]
    plain = AllGather.ring_bytes(replica.nbytes, 4)
    return found.compressed, found.wire_bytes - (3 - found.compressed) * plain - sent[0]


@pytest.mark.parametrize(("share", "compressed"), [(64, 0), (2048, 2)])
def test_what_ranks_send_to_agree_counts_where_weights_are_gathered_as_differences(
    share: int, compressed: int
) -> None:
    """A few elements would save less than the messages by which ranks agree that nothing else wrote them."""
    assert on_ranks(4, updates, share) == [(compressed, 0)] * 4


@pytest.mark.parametrize("ranks", tiered([2, 4], quick=[2]))
@pytest.mark.parametrize(("dtype", "saved"), [(torch.bfloat16, 0.15), (torch.float32, 0.25)], ids=str)
def test_a_large_vocabulary_is_sent_in_its_own_dtype(ranks: int, dtype: torch.dtype, saved: float) -> None:
    found = on_ranks(ranks, large_vocabulary, dtype)
    # The rank that owns the table sends it as it is, and a few bytes to agree.
    assert all(wire <= raw + 8 * ranks and compressed == 2 for raw, wire, compressed in found)
    raw, wire = (sum(one[n] for one in found) for n in range(2))
    assert wire < (1 - saved) * raw, (wire, raw)


def with_excluded(rank: int, how: str, kind: str) -> Any:
    """Excluded elements after a call, and those of all ranks before; what was sent of the plain bytes; what of a float64 sum."""
    ranks, numel = dist.get_world_size(), 4096
    comm = make(dp="int8", dp_gather="int8", zero_gather="int8", feedback="int8", excluded=how)
    mine = values(rank, numel)
    mine[::7] = 0.0
    before: list[Any] = [None] * ranks
    dist.all_gather_object(before, mine)
    bucket = Bucket("b", ((256, 3000),))
    own = slice(rank * numel // ranks, (rank + 1) * numel // ranks)
    if kind == "all_reduce":
        work, after, expected = comm.all_reduce(mine, "dp", bucket=bucket), mine, torch.stack(before)
    elif kind == "reduce_scatter":
        after = torch.empty(numel // ranks)
        work, expected = comm.reduce_scatter(after, mine, "dp", bucket=bucket), torch.stack(before)[:, own]
    else:
        after = torch.empty(numel)
        work = comm.all_gather(after, mine[own].clone(), "zero_gather", bucket=bucket)
        expected = torch.cat([part.chunk(ranks)[i] for i, part in enumerate(before)])[None]
    work.wait()
    start = own.start if kind == "reduce_scatter" else 0
    places = slice(max(256 - start, 0), min(3000 - start, after.numel()))
    (metrics,) = comm.metrics().values()
    return after[places], expected[:, places], metrics.ratio


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_excluded_gradients_are_rounded_to_bf16_only_where_the_config_says_so(kind: str) -> None:
    raw = on_ranks(2, with_excluded, "raw", kind)
    rounded = on_ranks(2, with_excluded, "bf16", kind)
    for after, contributions, _ in raw:
        assert torch.equal(after, contributions.sum(0))
    for (after, contributions, ratio), (*_, ratio_of_raw) in zip(rounded, raw, strict=True):
        exact = contributions.double().sum(0)
        bound = 2**-8 * (contributions.double().abs().sum(0) * (1 + 2**-8) + exact.abs())
        assert bool(((after.double() - exact).abs() <= bound).all())
        assert torch.equal(after == 0, exact == 0)
        if kind == "all_gather":  # weights
            assert torch.equal(after.double(), exact) and ratio == ratio_of_raw
        else:
            assert not torch.equal(after.double(), exact) and ratio < 0.7 * ratio_of_raw
    if kind == "all_reduce":
        assert torch.equal(rounded[0][0], rounded[1][0])


def with_repeated_parameters(rank: int) -> bool:
    comm = make(dp="int8", dp_gather="int8", excluded="bf16")
    comm.keep_excluded([torch.ones(1)])
    mine = values(rank, 4096)
    plain = mine.clone()
    dist.all_reduce(plain)
    work = comm.all_reduce(mine, "dp", bucket=Bucket("b", ((256, 3000),)))
    work.wait()
    return torch.equal(mine[256:3000], plain[256:3000])


def test_excluded_gradients_of_repeated_parameters_keep_their_dtype() -> None:
    assert all(on_ranks(2, with_repeated_parameters))
