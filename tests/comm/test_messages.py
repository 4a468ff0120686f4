"""Pipelines' messages, weights by difference, the probe, ends of a run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ssdtrain
from ssdtrain.codecs.base import Key
from ssdtrain.codecs.zfp import Zfp
from ssdtrain.comm import Bucket, probe
from ssdtrain.comm.routing import CHANGED, IN_FULL
from tests.comm.test_collectives import make, values
from tests.support.logs import heard_warnings
from tests.support.ranks import on_ranks, survivors
from tests.support.tensors import all_equal
from tests.support.tiers import tiered


def passed_on(rank: int, codec: str, error: float, dtype: torch.dtype) -> Any:
    comm = make(pp_forward=codec)
    peer = 1 - rank
    sent, received = values(rank, 40_000, dtype).view(4, 100, 100), torch.empty(4, 100, 100, dtype=dtype)
    issue_send = lambda t: dist.isend(t, peer)  # noqa: E731
    issue_receive = lambda t: dist.irecv(t, peer)  # noqa: E731
    works = [
        comm.point_to_point.send(sent, "pp_forward", peer, issue_send),
        comm.point_to_point.receive(received, "pp_forward", peer, issue_receive),
    ]
    kept = sent.clone()
    sent.zero_()  # may change as soon as it has been issued
    for work in works:
        work.wait()
    wanted = values(peer, 40_000, dtype).view(4, 100, 100).float()
    assert (received.float() - wanted).norm() <= error * wanted.norm()
    for tensor in (
        torch.ones(9000, dtype=torch.int64),
        torch.ones(9000, dtype=torch.bool),
        torch.tensor(1.0),
    ):
        assert comm.point_to_point.send(tensor, "pp_forward", peer, issue_send) is None
        assert comm.point_to_point.receive(tensor, "pp_forward", peer, issue_receive) is None
    figures = comm.metrics()["pp_forward"]
    assert figures.raw_bytes == kept.nbytes + 9000 * 8 + 9000 + 4
    return figures.wire_bytes - (9000 * 9 + 4)


@pytest.mark.parametrize(
    ("codec", "error", "dtype"),
    tiered(
        [
            ("int8", 0.02, torch.float32),
            ("int8", 0.02, torch.bfloat16),
            ("zfp:rate=16", 0.001, torch.float32),
            ("exact", 0.0, torch.float32),
            ("exact", 0.0, torch.bfloat16),
        ],
        quick=[("int8", 0.02, torch.bfloat16), ("exact", 0.0, torch.float32)],
    ),
)
def test_a_message_to_a_neighbour(codec: str, error: float, dtype: torch.dtype) -> None:
    for wire in on_ranks(2, passed_on, codec, error, dtype):
        assert wire < 40_000 * dtype.itemsize


def stepped(rank: int, dtype: torch.dtype) -> Any:
    comm = make(zero_gather="int4:hadamard")
    ranks, share = dist.get_world_size(), 3000
    replica = torch.zeros(ranks * share, dtype=dtype)
    master = values(rank, share)
    exact = ((0, 5), (share + 10, share + 20))
    far = []
    for step in range(12):
        master = master + 0.01 * values(100 * step + rank, share)
        replica.view(ranks, share)[rank].copy_(master)
        comm.gather_weights(replica, replica.view(ranks, share)[rank], None, Bucket("w", exact)).wait()
        assert comm.metrics()["zero_gather"].compressed == step
        mine = replica.view(ranks, share)[rank].float()
        far.append(float((mine - master).norm() / (0.01 * share**0.5)))
        a, b = exact[rank]
        part = slice(a - rank * share, b - rank * share)
        assert torch.equal(mine[part], master[part].to(dtype).float())
    everywhere = [torch.empty_like(replica) for _ in range(ranks)]
    dist.all_gather(everywhere, replica)
    assert all(torch.equal(other, replica) for other in everywhere)
    comm.forget_weights()
    before = replica.clone()
    comm.gather_weights(replica, replica.view(ranks, share)[rank], None, Bucket("w", exact)).wait()
    assert torch.equal(replica, before)
    assert dict(comm.metrics()["zero_gather"].fallbacks) == {IN_FULL: 2}
    return far


@pytest.mark.parametrize("dtype", tiered([torch.float32, torch.bfloat16], quick=[torch.bfloat16]), ids=str)
def test_weights_gathered_by_difference_do_not_drift(dtype: torch.dtype) -> None:
    for far in on_ranks(2, stepped, dtype):
        # Always within about one difference's error of the exact weights, at the end as at the beginning.
        assert max(far) < (0.3 if dtype == torch.float32 else 0.6)


class Clock:
    """In the place of the module `time`: a call takes a millisecond, and what takes longer says so."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.5e-3
        return self.now


def slow(rank: int) -> Any:
    records = heard_warnings()
    clock, encode = Clock(), Zfp.encode
    probe.time = clock

    def slowly(self: Zfp, x: torch.Tensor, out: torch.Tensor, key: Key | None = None) -> int:
        clock.now += 0.5
        return encode(self, x, out, key)

    Zfp.encode = slowly
    comm = make(dp="zfp:rate=31", dp_gather="zfp:rate=31", probe=True)
    for _ in range(3):
        assert comm.all_reduce(values(rank, 300_000), "dp") is None
        comm.step_end()
    found = comm.metrics()["dp"]
    return [records, dict(found.fallbacks)]


def test_a_codec_that_costs_more_than_it_saves_steps_back_loudly() -> None:
    said = []
    for records, fallbacks in on_ranks(2, slow):
        assert fallbacks == {"the codec costs more time than it saves": 3}
        said.append([record for record in records if "costs" not in record and " ms" in record])
    assert said[1] == [], "one message for all ranks"
    (message,) = said[0]
    for part in ("comm.dp", "all_reduce", "MB from each rank", "GB/s", "[all ranks]"):
        assert part in message, message


SMALL = {"min_bytes": 0, "warmup_steps": 0, "probe": False}
"""Compresses everything, from the first step on."""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(3)]
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def trained(rank: int, how: str, comm: dict[str, Any] | None) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model: Any = Small()
    if how == "fsdp":
        for layer in model.body:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.02)
    runtime = ssdtrain.attach(model, {"comm": {**SMALL, **comm}}) if comm is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        x = values(10 * step + rank, 64 * 32).view(32, 64)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if runtime is not None:
            runtime.step_end()
        losses.append(loss.item())
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    figures = runtime.statistics().comm if runtime is not None else {}
    return [losses, [p.clone() for p in parameters], figures]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_plain_pytorch_trains_with_compressed_gradients(how: str) -> None:
    plain = on_ranks(2, trained, how, None)
    same = on_ranks(2, trained, how, {"preset": "exact"})
    lossy = on_ranks(2, trained, how, {"dp": "int4:hadamard", "dp_gather": "int8", "feedback": "int8"})
    for rank in range(2):
        assert same[rank][0] == plain[rank][0]
        assert all_equal(same[rank][1], plain[rank][1])
        figures = same[rank][2]["zero_gather" if how == "fsdp" else "dp"]  # FSDP2 averages gradients
        assert figures.compressed and figures.wire_bytes < 0.95 * figures.raw_bytes
        figures = lossy[rank][2]["dp"]
        assert figures.compressed and not figures.fallbacks
        assert figures.wire_bytes < 0.5 * figures.raw_bytes
        assert lossy[rank][0] == pytest.approx(plain[rank][0], rel=0.05)
    assert all_equal(lossy[0][1], lossy[1][1])


def gradients(model: nn.Module, seed: int, comm: dict[str, Any] | None) -> Any:
    """Of a sharded model, in full, and what was sent."""
    runtime = ssdtrain.attach(model, {"comm": comm or {}, "enabled": comm is not None})
    model(values(seed, 64 * 32).view(32, 64)).square().mean().backward()
    found: Any = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return [found, runtime.comm and runtime.comm.metrics()["dp"]]


def all_but_excluded_are_compressed(ranks: int, function: Any, *arguments: Any, calls: int) -> None:
    plain, _ = on_ranks(ranks, function, *arguments, None)[0]
    lossy, figures = on_ranks(ranks, function, *arguments, {"dp": "int8", **SMALL})[0]
    assert (figures.calls, figures.compressed, dict(figures.fallbacks)) == (calls, calls, {})
    for name, gradient in plain.items():
        excluded = name.startswith("1.") or name.endswith("bias")
        assert torch.equal(lossy[name], gradient) == excluded, name
        assert (lossy[name] - gradient).norm() <= 0.02 * gradient.norm()


def gradients_of_a_list(rank: int, columns: bool, comm: dict[str, Any] | None) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 65), nn.LayerNorm(65), nn.Linear(65, 256))
    place = (lambda p: Shard(1) if p.shape == (65, 64) else None) if columns else None
    fully_shard(model[0], shard_placement_fn=place)
    fully_shard([model[2], model[1]])
    fully_shard(model)
    return gradients(model, rank, comm)


@pytest.mark.parametrize("columns", [False, True])
def test_modules_that_are_sharded_together_or_by_columns_are_compressed(columns: bool) -> None:
    all_but_excluded_are_compressed(2, gradients_of_a_list, columns, calls=2)


def gradients_of_two_dimensions(_: int, comm: dict[str, Any] | None) -> Any:
    """Tensor parallelism inside of data parallelism, as `fully_shard` composes with it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(64, 132), nn.GELU(), nn.Linear(132, 65))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return gradients(model, mesh.get_local_rank("dp"), comm)


@pytest.mark.slow
def test_shards_of_tensor_parallel_parameters_are_compressed() -> None:
    all_but_excluded_are_compressed(4, gradients_of_two_dimensions, calls=1)


def trained_with_steps(rank: int, wrapper: str, announced: bool, evaluates: bool = False) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model: Any = Small()
    model = DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model)
    comm = {**SMALL, "dp": "int4:block=128,round=stochastic", "feedback": "int8", "warmup_steps": 2}
    runtime = ssdtrain.attach(model, {"comm": comm})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        for microbatch in range(2):
            model(values(7 * step + 2 * microbatch + rank, 64 * 4).view(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if announced:
            runtime.step_end()
        if evaluates:
            if rank == 0:  # a step is not over here: the others wait for this rank
                model.module(values(step, 64 * 4).view(4, 64))
            dist.barrier()
    own = [p.to_local() if wrapper == "fsdp2" else p for p in model.parameters()]
    return runtime.comm.steps, [parameter.detach().clone() for parameter in own]


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_loop_that_announces_no_steps_sends_what_one_that_does_sends(wrapper: str) -> None:
    """Its steps end where the next gradients are reduced: warm-up passes, and random numbers differ from step to step."""
    announced, unannounced = (on_ranks(2, trained_with_steps, wrapper, flag) for flag in (True, False))
    for (steps, expected), (counted, found) in zip(announced, unannounced, strict=True):
        assert (steps, counted) == (6, 5)
        assert all(map(torch.equal, expected, found))


def test_ranks_end_unannounced_steps_together() -> None:
    assert [steps for steps, _ in on_ranks(2, trained_with_steps, "ddp", False, True)] == [5, 5]


def joined(rank: int) -> str:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Small())
    ssdtrain.attach(model, {"comm": {"dp": "int8", "min_bytes": 0, "probe": False}})
    model(values(rank, 64 * 4).view(4, 64)).sum().backward()
    with pytest.raises(RuntimeError, match="same number of batches") as found, model.join():
        model(values(rank, 64 * 4).view(4, 64)).sum().backward()
    return str(found.value)


def test_uneven_inputs_are_refused_and_do_not_hang() -> None:
    """A rank that has joined calls no step_end, whose exchange would meet another collective."""
    assert all(text.startswith("ssdtrain.comm: ") for text in on_ranks(2, joined))


class WithTable(nn.Module):
    """An embedding and an output layer of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(256, 64)
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def gradients_of_shared_memory(rank: int, how: str) -> Any:
    """By config: the gradients of two parameters in a bucket each, and the names of buckets that have residuals."""
    comm = {"dp": "int4", "dp_gather": "int8", "feedback": "int8", "min_bytes": 0, "probe": False}
    return [_of_shared_memory(rank, how, config) for config in (None, comm, {**comm, "exclude": "none"})]


def _of_shared_memory(rank: int, how: str, comm: dict[str, Any] | None) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model = WithTable()
    if how == "shared":
        model.head.weight.data = model.table.weight.data
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
    runtime = None if comm is None else ssdtrain.attach(wrapped, {"comm": comm})
    table, head = model.table.weight, model.head.weight
    if how == "exchanged":
        table.data, head.data = head.data, table.data
    for _ in range(2):  # DDP makes its buckets anew after the first
        wrapped.zero_grad()
        wrapped(torch.arange(rank, 256, 3)).square().mean().backward()
    names: set[str] = set()
    if runtime is not None and runtime.comm is not None and runtime.comm.feedback is not None:
        names = {name.split("|")[2] for name in runtime.comm.feedback.state_dict()["pieces"]}
    return table.grad, head.grad, names


@pytest.mark.parametrize("how", ["shared", "exchanged"])
def test_parameters_that_share_or_exchange_memory_are_not_mistaken(how: str) -> None:
    plain, excluded, everything = on_ranks(2, gradients_of_shared_memory, how)[0]
    assert torch.equal(excluded[0], plain[0]) and not torch.equal(excluded[1], plain[1])
    assert len(everything[2]) == 3  # one bucket of both, then one of each


def abandoned(rank: int) -> str:
    comm = make(dp="int8", dp_gather="int8")
    comm.all_reduce(values(rank, 1000), "dp").wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        for _ in range(100):
            comm.all_reduce(values(rank, 1_000_000), "dp").wait()
    return str(raised.value)


def test_a_killed_peer_is_an_error_and_not_a_hang() -> None:
    (said,) = survivors(2, abandoned)
    assert ("onnection" in said or "peer" in said) and "imed out" not in said, said


def changed_between_steps(rank: int, dtype: torch.dtype) -> list[bool]:
    comm = make(zero_gather="int4:hadamard")
    share = 70_000
    replica, master = torch.zeros(2 * share, dtype=dtype), values(rank, share)
    own, other = replica.view(2, share)[rank], replica.view(2, share)[1 - rank]
    writes = {
        2: lambda: other.mul_(1.5),
        4: lambda: other.data.fill_(0.0),
        6: lambda: other[100:300].copy_(other[300:500].clone()),
        8: lambda: other.copy_(other.roll(4096)),
    }
    found = []
    for step in range(10):
        master = master + 0.01 * values(100 * step + rank, share)
        own.copy_(master)
        if rank == 0 and step in writes:
            writes[step]()  # this rank alone: the other has to follow
        before = comm.metrics().get("zero_gather")
        comm.gather_weights(replica, own, None, Bucket("w")).wait()
        after = comm.metrics()["zero_gather"]
        found.append(after.fallbacks[CHANGED] > (before.fallbacks[CHANGED] if before else 0))
        comm.step_end()
        everywhere = [torch.empty_like(replica) for _ in range(2)]
        dist.all_gather(everywhere, replica)
        assert torch.equal(everywhere[0], everywhere[1]), step
        exact = torch.cat([torch.empty_like(master)] * 2)
        dist.all_gather_into_tensor(exact, master)
        assert (replica.float() - exact).norm() < 0.02 * exact.norm(), step
    return found


@pytest.mark.parametrize("dtype", tiered([torch.float32, torch.bfloat16], quick=[torch.bfloat16]), ids=str)
def test_weights_that_somebody_else_changed_are_gathered_in_full_by_all(dtype: torch.dtype) -> None:
    """Written in place on one rank, in four ways, without a word to the engine: replicas stay equal and right."""
    wanted = [step in (2, 4, 6, 8) for step in range(10)]
    assert on_ranks(2, changed_between_steps, dtype) == [wanted, wanted]
