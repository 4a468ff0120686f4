"""DeepSpeed's pipeline: `torchrun --nproc_per_node 2 -m examples.small.deepspeed_pipeline`, one stage a process.

The script is that of a run without SSDTrain, but for `install` and the block in the config. The first stage offloads; the
last one runs each backward right after its forward, and keeps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain_ds
from examples.small.command import compare, parse
from examples.support.data import batches, corpus
from examples.support.model import Block, GPTConfig

STEPS = 3
MICROBATCHES = 4
SHAPE = GPTConfig(layers=4, hidden=128, heads=4, sequence=128)


class Embedding(nn.Module):
    """Tokens [B, T] to [B, T, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(SHAPE.vocabulary, SHAPE.hidden)
        self.position = nn.Embedding(SHAPE.sequence, SHAPE.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    """[B, T, C] to logits [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SHAPE.hidden)
        self.logits = nn.Linear(SHAPE.hidden, SHAPE.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(directory: str | None) -> list[float]:
    torch.manual_seed(0)
    blocks = [LayerSpec(Block, SHAPE) for _ in range(SHAPE.layers)]
    model = PipelineModule(
        [LayerSpec(Embedding), *blocks, LayerSpec(Head)],
        num_stages=dist.get_world_size(),
        loss_fn=loss_of,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if directory is not None:
        config["ssdtrain"] = {"offload": {"directories": directory, "amount": "all", "min_bytes": "64KiB"}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    source = batches(corpus(), microbatch=2, sequence=SHAPE.sequence, seed=0)
    losses = [engine.train_batch(source).item() for _ in range(STEPS)]
    engine.destroy()  # with SSDTrain rank 0 prints a table
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    ssdtrain_ds.install()
    if not torch.cuda.is_available():  # DeepSpeed would compile it at start, for minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=os.environ.get("BACKEND", "gloo"))
    try:
        return compare(train, chosen.directory, rank=dist.get_rank())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
