"""Compressed collectives beside options and layers of DeepSpeed that make their messages in another way."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.deepspeed.test_comm import COMM, engine_of, train
from tests.support.ranks import StandingRanks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300), pytest.mark.slow]


FETCHED = {**COMM, "dp": "off", "dp_gather": "off", "zero_gather": "int4", "exclude": ["*norm*", "*bias*"]}


def fetched(rank: int, option: str) -> Any:
    """Names of the weights that a forward gets changed, and messages by whether they were compressed."""
    import deepspeed

    import ssdtrain_ds
    from tests.deepspeed import models

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**6}
    engine = engine_of(3, FETCHED, zero_optimization={**zero, **({option: True} if option else {})})
    parameters = dict(engine.module.named_parameters())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
        for parameter in parameters.values():
            parameter.normal_(std=0.3)
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        exact = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    changed: set[str] = set()
    names = {id(parameter): name for name, parameter in parameters.items()}

    def look(module: nn.Module, _: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not torch.equal(parameter.data, exact[names[id(parameter)]]):
                changed.add(names[id(parameter)])

    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
    engine(*next(models.batches(1, 1)))
    found = ssdtrain_ds.runtime_of(engine).comm.metrics()["zero_gather"]
    engine.destroy()
    return sorted(changed), found.compressed, found.calls


@pytest.mark.parametrize(
    "option", ["", "stage3_allgather_sequential", "stage3_use_all_reduce_for_fetch_params"]
)
def test_weights_that_are_excluded_are_fetched_as_they_are(option: str, two_ranks: StandingRanks) -> None:
    for changed, compressed, calls in two_ranks(fetched, option):
        assert not [name for name in changed if "norm" in name or "bias" in name]
        summed = option == "stage3_use_all_reduce_for_fetch_params"
        assert compressed > 0
        # Each module of the model has one weight matrix.
        matrices = [name for name in changed if name.endswith(".weight")]
        assert len(matrices) == 21 or summed
        assert calls >= compressed


def with_sparse_embedding(rank: int, comm: dict[str, Any] | None) -> Any:
    import ssdtrain_ds
    from tests.deepspeed import models

    def make() -> nn.Module:
        model = models.GPT()
        model.embedding.token = nn.Embedding(models.VOCABULARY, models.HIDDEN, sparse=True)
        return model

    engine = engine_of(0, comm, make, torch.optim.SGD)
    losses = train(engine, rank, 0, 2)
    runtime = ssdtrain_ds.runtime_of(engine)
    compressed = runtime.comm.metrics()["dp"].compressed if runtime is not None else 0
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.destroy()
    return losses, compressed, weights


def test_gradients_beside_those_of_a_sparse_embedding_are_compressed(two_ranks: StandingRanks) -> None:
    plain = two_ranks(with_sparse_embedding, None)
    raw = two_ranks(with_sparse_embedding, {**COMM, "dp": "raw", "dp_gather": "raw"})
    lossy = two_ranks(with_sparse_embedding, COMM)
    for before, after, small in zip(plain, raw, lossy, strict=True):
        assert before[0] == after[0]
        assert all(torch.equal(one, other) for one, other in zip(before[2], after[2], strict=True))
        assert small[1] > 0
    assert all(torch.equal(one, other) for one, other in zip(lossy[0][2], lossy[1][2], strict=True))


def engine_with_experts(comm: dict[str, Any] | None) -> Any:
    """Of a model that sends tokens by AutoEP's function, in a layer of that name, and recomputes half of them."""
    from deepspeed.module_inject.auto_ep_layer import _AllToAllV

    class AutoEPMoELayer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rank = torch.distributed.get_rank()
            splits = [[3, 5], [6, 2]]
            return _AllToAllV.apply(None, x, splits[rank], [splits[0][rank], splits[1][rank]])

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.expert = AutoEPMoELayer(), AutoEPMoELayer(), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.expert(self.first(self.expert(x)))
            back = x.new_zeros(8, 64) + x.sum() / 64
            mixed = back * self.expert(back).tanh()
            return torch.utils.checkpoint.checkpoint(
                lambda x: self.second(x).tanh(), mixed, use_reentrant=False
            )

    return engine_of(0, comm, Model, torch.optim.SGD, train_micro_batch_size_per_gpu=8)


def sent_to_experts(rank: int, *comms: dict[str, Any] | None) -> Any:
    """The outputs and gradients of engines in one process, whose forwards all run before their backwards; how many messages of
    each were compressed; whether DeepSpeed's functions are its own afterwards."""
    from deepspeed.module_inject.auto_ep_layer import _AllToAllV

    import ssdtrain_ds

    before = _AllToAllV.forward, _AllToAllV.backward
    engines = [engine_with_experts(comm) for comm in comms]
    for made in [copy.deepcopy(engine.module) for engine in engines]:
        assert made.first.forward.__self__ is made.first
    inputs = [
        torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)).requires_grad_() for _ in engines
    ]
    outs = [engine(x) for engine, x in zip(engines, inputs, strict=True)]
    for engine, out in zip(engines, outs, strict=True):
        engine.backward(out.square().sum())
    figures = [ssdtrain_ds.runtime_of(engine) for engine in engines]
    counts = [0 if one is None else getattr(one.comm.metrics().get("ep"), "compressed", 0) for one in figures]
    for engine in engines:
        engine.destroy()
        assert "forward" not in vars(engine.module.first)
    return (
        [out.detach() for out in outs],
        [x.grad for x in inputs],
        counts,
        before == (_AllToAllV.forward, _AllToAllV.backward),
    )


EP = {**COMM, "ep": "int8"}


@pytest.mark.parametrize("comms", [[None, EP, COMM], [EP, COMM, None], [COMM, None, EP]])
def test_experts_send_as_the_engine_says_that_has_them(
    comms: list[dict[str, Any] | None], two_ranks: StandingRanks
) -> None:
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer")
    exact = two_ranks(sent_to_experts, None)
    for (outs, gradients, counts, undone), ((out,), (gradient,), *_) in zip(
        two_ranks(sent_to_experts, *comms), exact, strict=True
    ):
        assert undone
        for comm, found, found_gradient, count in zip(comms, outs, gradients, counts, strict=True):
            compressed = comm is EP or (comm is not None and "ep" in comm)
            assert torch.equal(found, out) != compressed
            assert torch.equal(found_gradient, gradient) != compressed
            assert torch.allclose(found, out, rtol=0.05, atol=0.05)
            assert count == (5 if compressed else 0)  # two forwards, two backwards, and a recomputation


def dropped(rank: int) -> Any:
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.moe.sharded_moe import _AllToAll
    from deepspeed.runtime.zero import stage_1_and_2

    def functions() -> list[Any]:
        return [TorchBackend.all_reduce, _AllToAll.forward, stage_1_and_2.all_gather_dp_groups]

    engine_of(0, None).destroy()  # joins the group
    before = functions()
    engine = engine_of(0, {**COMM, "ep": "int8"})
    train(engine, rank, 0, 1)
    replaced = functions() != before
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    return replaced, reference() is None, functions() == before


def test_an_engine_that_is_dropped_without_destroy_compresses_nothing_of_others(
    two_ranks: StandingRanks,
) -> None:
    assert two_ranks(dropped) == [(True, True, True)] * 2
