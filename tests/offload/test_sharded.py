"""Weights that FSDP frees after a forward and gathers again for backward are not offloaded, however they are saved."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ssdtrain
from ssdtrain.pytorch.sharded import watch_sharded
from tests.support.ranks import on_ranks

WIDTH = 256
BATCH = 4
WEIGHT_BYTES = 2 * WIDTH * WIDTH  # in bfloat16
LAYERS = 3


class SavesDetached(torch.autograd.Function):
    """A linear layer that saves its weight as fused kernels do: no class and no base say that it is one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.detach())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(SavesDetached.apply(x.to(self.weight.dtype), self.weight)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class Model(nn.Module):
    def __init__(self, method: str = "forward") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.method = method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.method == "forward" else getattr(block, self.method)(x)
        # The head's own forward never runs.
        return SavesDetached.apply(x.to(self.head.weight.dtype), self.head.weight)


def each_block(model: Model, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def compiled(model: Model) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return each_block(model)


def together(model: Model) -> nn.Module:
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.blocks[2], model.head])
    return fully_shard(model)


def checkpointed(model: Model, offloads: bool) -> nn.Module:
    """With `offloads` as `activation_checkpointing_offload` of accelerate does it."""
    for index, block in enumerate(model.blocks):
        wrapped: nn.Module = checkpoint_wrapper(block)
        model.blocks[index] = offload_wrapper(wrapped) if offloads else wrapped
    return each_block(model)


def by_method(model: Model) -> nn.Module:
    from torch.distributed.fsdp import register_fsdp_forward_method

    model.method = "encode"
    each_block(model)
    for block in model.blocks:
        register_fsdp_forward_method(block, "encode")
    return model


def fsdp1(model: Model, use_orig_params: bool) -> nn.Module:
    wrap = partial(FullyShardedDataParallel, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    return wrap(model)


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "fsdp2": each_block,
    "fsdp2-not-resharded": partial(each_block, reshard_after_forward=False),
    "fsdp2-bf16": partial(each_block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp2-together": together,
    "fsdp2-compiled": compiled,
    "fsdp2-checkpointed": partial(checkpointed, offloads=False),
    "fsdp2-checkpointed-and-offloaded": partial(checkpointed, offloads=True),
    "fsdp2-by-method": by_method,
    "fsdp1": partial(fsdp1, use_orig_params=False),
    "fsdp1-orig-params": partial(fsdp1, use_orig_params=True),
    "ddp": DistributedDataParallel,
}


def train(rank: int, how: str, offload: bool) -> tuple[list[torch.Tensor], int]:
    """Losses and final parameters, and the bytes that offload was asked for."""
    torch.manual_seed(0)
    plain = Model()
    model = WRAPPERS[how](plain)
    runtime = None
    with tempfile.TemporaryDirectory() as directory:
        if offload:
            section = {"directories": directory, "min_bytes": "1KiB", "threads": 1}
            runtime = ssdtrain.attach(model, {"offload": section})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(BATCH, WIDTH, generator=generator)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        saved = 0
        if runtime is not None:
            statistics = runtime.statistics()
            saved = statistics.offload.saved_bytes // 3
            runtime.close()
    found += [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert not [hook for hook in hooks if "GatheredStorages" in getattr(hook, "__qualname__", "")]
    return found, saved


def trained(rank: int) -> dict[str, tuple[bool, int] | str]:
    """For each wrapper if training with and without offload is equal, and the bytes that offload was asked for; or an error."""
    found: dict[str, tuple[bool, int] | str] = {}
    for how in WRAPPERS:
        expected, _ = train(rank, how, offload=False)
        try:
            bits, saved = train(rank, how, offload=True)
        except RuntimeError as error:
            found[how] = str(error)
        else:
            found[how] = len(expected) == len(bits) and all(map(torch.equal, expected, bits)), saved
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple[bool, int] | str]]:
    return on_ranks(2, trained, timeout=280)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", WRAPPERS)
def test_weights_that_are_freed_and_gathered_again_stay(
    how: str, results: list[dict[str, tuple[bool, int] | str]]
) -> None:
    for result in results:
        found = result[how]
        assert not isinstance(found, str), found
        equal, saved = found
        assert equal
        # All that a step saves of activations is less than one weight.
        assert 0 < saved < WEIGHT_BYTES


def test_a_model_without_shards_gets_no_hooks(tmp_path: Any) -> None:
    model = Model()
    with ssdtrain.attach(model, {"offload": {"directories": str(tmp_path), "amount": "all"}}):
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert watch_sharded(model) is None
