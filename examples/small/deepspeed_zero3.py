"""DeepSpeed's ZeRO-3: `torchrun --nproc_per_node 2 -m examples.small.deepspeed_zero3`; one process works too.

The script is that of a run without SSDTrain, but for `install` and the block in the config. Parameters that ZeRO-3 gathers
are its own affair and stay; what forward saves is offloaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ssdtrain_ds
from examples.small.command import compare, parse
from examples.support.data import batches, corpus
from examples.support.model import GPT, GPTConfig

STEPS = 3
SHAPE = GPTConfig(layers=4, hidden=128, heads=4, sequence=128)


def train(directory: str | None) -> list[float]:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
    }
    if directory is not None:
        config["ssdtrain"] = {"offload": {"directories": directory, "min_bytes": "64KiB"}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    source = batches(corpus(), microbatch=2, sequence=SHAPE.sequence, seed=dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = engine(*(part.to(engine.device) for part in next(source)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
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
