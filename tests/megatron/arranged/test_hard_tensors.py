"""Saved tensors of Megatron's that are hard for an offload engine, each by its name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from ssdtrain.config import load_config
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.runtime import Runtime
from ssdtrain_megatron import _compat
from tests.megatron.rows import Row
from tests.megatron.training import HEADS, HIDDEN, LENGTH, SEQUENCES, VOCABULARY, Trainer


@pytest.fixture
def runtime(config: dict[str, Any]) -> Any:
    config["offload"].update(prefetch="64KiB", in_flight=1)
    with Runtime(load_config(config)) as made:
        yield made


def test_vocabulary_parallel_cross_entropy_returns_its_modified_saved_tensor(runtime: Runtime) -> None:
    """Its gradient lives in the buffer that unpack handed out, after the handle is gone and others are loaded."""
    logits = [torch.randn(LENGTH, SEQUENCES, VOCABULARY, requires_grad=True) for _ in range(6)]
    labels = [torch.randint(0, VOCABULARY, (LENGTH, SEQUENCES)) for _ in logits]

    def gradients(keep: Any) -> list[torch.Tensor]:
        losses = []
        for number, (logit, label) in enumerate(zip(logits, labels, strict=True)):
            with keep(number):
                # The function may write into its input; a model's logits are no leaves either.
                losses.append(tensor_parallel.vocab_parallel_cross_entropy(logit * 1.0, label).sum())
        found = [torch.autograd.grad(loss, logit)[0] for loss, logit in zip(losses, logits, strict=True)]
        return found

    expected = gradients(lambda number: nullcontext())
    found = gradients(lambda number: runtime.forward(microbatch=number))
    statistics = runtime.statistics()
    assert statistics.offload.loaded_bytes >= 4 * logits[0].nbytes
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_three_overlapping_views_of_the_qkv_split_are_stored_once(runtime: Runtime) -> None:
    attention = Trainer(Row("one process")).chunks[0].module.decoder.layers[0].self_attention
    hidden = torch.randn(LENGTH, SEQUENCES, HIDDEN)

    def squares() -> torch.Tensor:
        query, key, value = attention.get_query_key_value_tensors(hidden)
        assert query.shape == (LENGTH, SEQUENCES, HEADS, HIDDEN // HEADS)
        storages = {view.untyped_storage()._cdata for view in (query, key, value)}
        assert len(storages) == 1, "no longer views of one storage"
        total: torch.Tensor = (query * query).sum() + (key * key).sum() + (value * value).sum()
        return total

    def gradient(total: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(total, attention.linear_qkv.weight)[0]

    expected = gradient(squares())
    with runtime.forward():
        total = squares()
    found = runtime.statistics()
    mixed = 3 * hidden.nbytes
    # The three views, and the input of the projection.
    assert found.offload.saved_bytes == mixed + hidden.nbytes
    assert found.offload.shared_tensors >= 2
    assert torch.equal(gradient(total), expected)


@pytest.mark.parametrize("times", [1, 2])
def test_the_checkpoint_function_restores_the_tracker_of_random_states(runtime: Runtime, times: int) -> None:
    checkpoint = Checkpoint()
    checkpoint.register_tracker("megatron", _compat.random_tracker)
    Trainer(Row("one process"))  # seeds the tracker
    masks = []

    def block(x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            mask = torch.rand_like(x)
        with get_cuda_rng_tracker().fork():
            mask = mask * torch.rand_like(x)
        masks.append(mask)
        return torch.sin(x * mask)

    x = torch.randn(64, 64, requires_grad=True)
    with runtime.forward():
        y = checkpoint(block, x)
    with get_cuda_rng_tracker().fork():
        torch.rand(3)  # the tracker moves on between forward and backward
    state = {name: value.clone() for name, value in get_cuda_rng_tracker().get_states().items()}
    for number in range(times):
        y.sum().backward(retain_graph=number + 1 < times)
    assert len(masks) == 1 + times
    assert all(torch.equal(masks[0], mask) for mask in masks)
    after = get_cuda_rng_tracker().get_states()
    assert all(torch.equal(state[name], after[name]) for name in state)
