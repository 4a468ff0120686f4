"""Compressed collectives beside options and layers of DeepSpeed that make their messages in another way."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.deepspeed.test_comm import COMM, engine_of, train
from tests.support.ranks import StandingRanks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[StandingRanks]:
    ranks = StandingRanks(2)
    yield ranks
    ranks.close()


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
    import deepspeed
    from deepspeed import comm as dist

    import ssdtrain_ds
    from tests.deepspeed import models

    engine_of(0, None).destroy()  # joins the group
    torch.manual_seed(0)
    model = models.GPT()
    model.embedding.token = nn.Embedding(models.VOCABULARY, models.HIDDEN, sparse=True)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": models.BATCH, "steps_per_print": 10**9}
    if comm is not None:
        config["ssdtrain"] = {"comm": comm}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    losses = train(engine, rank, 0, 2)
    runtime = ssdtrain_ds.runtime_of(engine)
    compressed = runtime.comm.metrics()["dp"].compressed if runtime is not None else 0
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    engine.destroy()
    assert dist.is_initialized()
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


def sent_to_experts(rank: int) -> Any:
    from deepspeed.module_inject.auto_ep_layer import _AllToAllV

    import ssdtrain_ds

    engine = engine_of(0, {**COMM, "ep": "int8"})
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    splits = [[3, 5], [6, 2]]
    out = _AllToAllV.apply(None, x, splits[rank], [splits[0][rank], splits[1][rank]])
    out.square().sum().backward()
    found = ssdtrain_ds.runtime_of(engine).comm.metrics().get("ep")
    engine.destroy()
    plain = _AllToAllV.apply(None, x, splits[rank], [splits[0][rank], splits[1][rank]])
    close = torch.allclose(out, plain, atol=0.05) and torch.allclose(x.grad, 2 * x, atol=0.1)
    return 0 if found is None else found.compressed, close, "forward" in vars(_AllToAllV)


def test_tokens_for_experts_of_autoep_are_compressed(two_ranks: StandingRanks) -> None:
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer")
    assert two_ranks(sent_to_experts) == [(2, True, True)] * 2


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


def beside_another(rank: int, comms: list[dict[str, Any] | None]) -> Any:
    import ssdtrain_ds.comm.shared_layers as shared

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    shared.logger.addHandler(handler)
    engines = [engine_of(0, comm) for comm in comms[:-1]]
    plain = shared.tensor_parallel_layers
    shared.tensor_parallel_layers = lambda model: ["a layer"]  # type: ignore[assignment]
    try:
        engines.append(engine_of(0, comms[-1]))
    finally:
        shared.tensor_parallel_layers = plain
        shared.logger.removeHandler(handler)
    for engine in engines:
        engine.destroy()
    return len([text for text in messages if "different ssdtrain.comm.tp" in text])


TP = {**COMM, "tp": "int8"}


@pytest.mark.parametrize(
    ("comms", "warnings"),
    [
        ([TP, None], 1),
        ([TP, COMM], 1),
        ([None, TP], 0),
        ([TP, TP], 0),
        ([COMM, None], 0),
        ([TP], 0),
    ],
)
def test_engines_whose_layers_follow_another_policy_say_so(
    comms: list[dict[str, Any] | None], warnings: int, two_ranks: StandingRanks
) -> None:
    assert two_ranks(beside_another, comms) == [warnings] * 2
