"""What ranks of tests of exact messages do, on any device: each call beside torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.comm import Bucket, Communicator, Policy, overflow
from ssdtrain.comm.coding import SECTION
from ssdtrain.config import load_config
from tests.comm.test_collectives import values

SIZE = 1 << 17
NO_ONE = -1


def communicator(device: torch.device, **comm: Any) -> Communicator:
    config = load_config({"comm": {"min_bytes": 0, "warmup_steps": 0, "probe": False, **comm}}).comm
    return Communicator(Policy.from_config(config), device)


def scattered(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose exponents lie too far apart for the codec."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-60, 60, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * 2.0**exponents).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def own_device(kind: str) -> torch.device:
    device = torch.device(kind, dist.get_rank()) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


def every_collective(rank: int, kind: str, dtype: torch.dtype, overflowing: int) -> Any:
    """Ratios of wire bytes and payloads that overflowed, by dimension.

    Args:
        overflowing: the rank whose payloads do not fit.
    """
    device, ranks = own_device(kind), dist.get_world_size()
    comm = communicator(device, preset="exact")

    def mine(size: int) -> torch.Tensor:
        make = scattered if rank == overflowing else values
        return make(rank, size, dtype).to(device)

    shard, whole = mine(SIZE), mine(SIZE * ranks)
    gathered, expected = (torch.zeros(SIZE * ranks, dtype=dtype, device=device) for _ in range(2))
    dist.all_gather_into_tensor(expected, shard)
    assert done(comm.all_gather(gathered, shard, "zero_gather"))
    assert same_bits(gathered, expected)
    for _ in range(2):  # weights after a step, in place
        shard = shard + 1
        gathered.view(ranks, -1)[rank].copy_(shard)
        dist.all_gather_into_tensor(expected, shard)
        assert done(
            comm.gather_weights(gathered, gathered.view(ranks, -1)[rank], None, Bucket("w", ((3, 9),)))
        )
        assert same_bits(gathered, expected)

    tokens = mine(SIZE * ranks).view(-1, 64)
    out, expected = torch.zeros_like(tokens), torch.zeros_like(tokens)
    dist.all_to_all_single(expected, tokens)
    assert done(comm.all_to_all(out, tokens, "ep"))
    assert same_bits(out, expected)

    out, expected = (torch.zeros(SIZE, dtype=dtype, device=device) for _ in range(2))
    dist.reduce_scatter_tensor(expected, whole)
    reduced = done(comm.reduce_scatter(out, whole, "tp"))
    assert reduced == (ranks == 2) and (not reduced or same_bits(out, expected))
    total, expected = whole.clone(), whole.clone()
    dist.all_reduce(expected)
    reduced = done(comm.all_reduce(total, "dp"))
    assert reduced == (ranks == 2) and (not reduced or same_bits(total, expected))

    pass_on(comm, mine(SIZE).view(64, -1))
    comm.step_end()
    return {name: (found.ratio, found.overflows) for name, found in comm.metrics().items()}


def done(work: Any) -> bool:
    return work is not None and work.wait()


def pass_on(comm: Communicator, tensor: torch.Tensor) -> None:
    """Send to the next rank, and receive from the one before; sends are waited for first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    received, expected = torch.zeros_like(tensor), torch.zeros_like(tensor)
    through = comm.point_to_point
    # All ranks issue their first message before the second, as Megatron orders them.
    orders = (0, 1) if rank % 2 else (1, 0)
    issued: dict[int, Any] = {}
    for order in orders:
        if order == 0:
            issued[0] = through.send(tensor, "pp_forward", after, lambda payload: dist.isend(payload, after))
        else:
            issued[1] = through.receive(
                received, "pp_forward", before, lambda payload: dist.irecv(payload, before)
            )
    works = {}
    for order in orders:
        works[order] = dist.isend(tensor, after) if order == 0 else dist.irecv(expected, before)
    for order in (0, 1):
        works[order].wait()
        if issued[order] is not None:
            issued[order].wait()
        else:
            assert order in issued
    if issued[1] is not None:
        assert same_bits(received, expected)


def one_peer_only(rank: int, kind: str, to: int) -> Any:
    """Rows that do not fit go from rank 0 to one peer, in both kinds of exchange; some rows are too few to be coded."""
    device = own_device(kind)
    comm = communicator(device, ep="exact")
    counts = [[5, 300, 290], [400, 700, 3], [300, 0, 8]]
    sends, receives = counts[rank], [row[rank] for row in counts]
    rows = [values(rank, 64 * n, torch.bfloat16).view(-1, 64) for n in sends]
    if rank == 0:
        rows[to] = scattered(rank, 64 * sends[to], torch.bfloat16).view(-1, 64)
    tokens = torch.cat(rows).to(device)
    out, expected = (torch.zeros(sum(receives), 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    dist.all_to_all_single(expected, tokens, receives, sends)
    for _ in range(2):
        assert done(comm.all_to_all(out.zero_(), tokens, "ep", receives, sends))
        assert same_bits(out, expected)
    comm.step_end()
    return comm.metrics()["ep"].overflows


def one_section_only(rank: int, kind: str) -> Any:
    """Of a gather of which a few elements do not fit on rank 1."""
    device, ranks = own_device(kind), dist.get_world_size()
    comm = communicator(device, zero_gather="exact")
    size = 20 * SECTION[device.type]
    shard = values(rank, size, torch.bfloat16)
    if rank == 1:
        shard[70_000:80_000] = scattered(rank, 10_000, torch.bfloat16)
    shard = shard.to(device)
    gathered, expected = (torch.zeros(ranks * size, dtype=shard.dtype, device=device) for _ in range(2))
    dist.all_gather_into_tensor(expected, shard)
    for _ in range(20):
        assert done(comm.all_gather(gathered.zero_(), shard, "zero_gather"))
        assert same_bits(gathered, expected)
    return comm.metrics()["zero_gather"].overflows, comm.metrics()["zero_gather"].ratio


def rests(rank: int, kind: str) -> Any:
    """Calls of which the first ones overflow: shares of bytes that were sent, and how many calls were not tried. Bits are equal
    in each."""
    overflow.LAG = 3
    device = own_device(kind)
    comm = communicator(device, zero_gather="exact", ep="exact", pp_forward="exact")
    coded: dict[str, list[int]] = {"zero_gather": [], "ep": [], "pp_forward": []}
    ranks = dist.get_world_size()
    for number in range(16):
        make = scattered if rank == 1 and number < 2 else values
        shard = make(rank, SIZE, torch.bfloat16).to(device)
        gathered, expected = (torch.zeros(ranks * SIZE, dtype=shard.dtype, device=device) for _ in range(2))
        before = {name: found.wire_bytes for name, found in comm.metrics().items()}
        dist.all_gather_into_tensor(expected, shard)
        assert done(comm.all_gather(gathered, shard, "zero_gather"))
        assert same_bits(gathered, expected)
        exchanged, expected = torch.zeros_like(shard), torch.zeros_like(shard)
        dist.all_to_all_single(expected, shard)
        assert done(comm.all_to_all(exchanged, shard, "ep"))
        assert same_bits(exchanged, expected)
        pass_on(comm, shard)
        for name, found in comm.metrics().items():
            sent = found.wire_bytes - before.get(name, 0)
            coded[name].append(round(100 * sent / (shard.nbytes // (2 if name == "ep" else 1))))
    comm.step_end()
    skipped = {name: found.fallbacks[overflow.OVERFLOWED] for name, found in comm.metrics().items()}
    return {name: (shares, skipped[name]) for name, shares in coded.items()}


def never_fits(rank: int, kind: str) -> Any:
    """Overflows of gathers of which none fits, calls that were not tried, and the ratio of bytes."""
    device, ranks = own_device(kind), dist.get_world_size()
    comm = communicator(device, zero_gather="exact")
    shard = scattered(rank, 1 << 15, torch.bfloat16).to(device)
    gathered = torch.zeros(ranks * shard.numel(), dtype=shard.dtype, device=device)
    for _ in range(400):
        assert done(comm.all_gather(gathered, shard, "zero_gather"))
    found = comm.metrics()["zero_gather"]
    return found.overflows, found.fallbacks[overflow.OVERFLOWED], found.ratio


def excluded(rank: int, kind: str, overflowing: int) -> Any:
    """Bytes of calls with excluded elements, "raw" and "exact", and payloads that overflowed; the elements are equal."""
    device, numel = own_device(kind), 120_000
    bucket = Bucket("b", ((7, 60_000), (90_000, 90_100)))
    kept = torch.zeros(numel, dtype=torch.bool)
    for start, stop in bucket.uncompressed_ranges:
        kept[start:stop] = True
    own = torch.arange(numel).tensor_split(dist.get_world_size())[rank]
    options = {"dp": "int8", "dp_gather": "int8", "zero_gather": "int8", "feedback": "int8"}
    results, figures = [], []
    for how in ("raw", "exact"):
        comm = communicator(device, excluded=how, **options)
        found: list[torch.Tensor] = []
        weights = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        for step in range(3):
            mine = values(rank + 10 * step, numel, torch.bfloat16)
            if rank == overflowing:
                mine = torch.where(kept, scattered(rank + step, numel, torch.bfloat16), mine)
            mine = mine.to(device)
            total, part = mine.clone(), torch.zeros_like(mine[own])
            assert done(comm.all_reduce(total, "dp", bucket=bucket))
            assert done(comm.reduce_scatter(part, mine, "dp", bucket=bucket._replace(name="c")))
            weights[own] = mine[own]
            assert done(comm.gather_weights(weights, weights[own[0] : own[-1] + 1], None, bucket))
            found += [total.cpu()[kept], part.cpu()[kept[own]], weights.cpu()[kept]]
            comm.step_end()
        results.append(found)
        figures.append({name: found.wire_bytes for name, found in comm.metrics().items()})
    assert all(map(same_bits, *results))
    return *figures, sum(found.overflows for found in comm.metrics().values())


def waited_in_another_order(rank: int, kind: str) -> None:
    """Several overflows under way on two groups, waited for in an order of each rank's own."""
    device, ranks = own_device(kind), dist.get_world_size()
    comm = communicator(device, zero_gather="exact", tp="exact")
    groups = [dist.group.WORLD, dist.new_group(list(range(ranks)))]
    works, outs, wanted = [], [], []
    for number in range(6):
        shard = (scattered if number % 3 != rank else values)(rank + 7 * number, SIZE, torch.bfloat16).to(
            device
        )
        expected = torch.zeros(ranks * SIZE, dtype=shard.dtype, device=device)
        dist.all_gather_into_tensor(expected, shard)
        outs.append(torch.zeros_like(expected))
        wanted.append(expected)
        works.append(comm.all_gather(outs[-1], shard, "zero_gather", groups[number % 2]))
    for number in reversed(range(6)) if rank else range(6):
        assert done(works[number])
    assert all(map(same_bits, outs, wanted))
    comm.step_end()
