"""FSDP2: `torchrun --nproc_per_node 2 -m examples.small.fsdp2`. Attach after `fully_shard`; one process works too."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ssdtrain
from examples.small.command import compare, parse
from examples.support.data import batches, corpus
from examples.support.model import GPT, GPTConfig

STEPS = 3
SHAPE = GPTConfig(layers=4, hidden=128, heads=4, sequence=128)


def train(directory: str | None) -> list[float]:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = batches(corpus(), microbatch=2, sequence=SHAPE.sequence, seed=dist.get_rank())
    runtime = None
    if directory is not None:
        runtime = ssdtrain.attach(
            model, {"offload": {"directories": directory, "amount": "all", "min_bytes": "64KiB"}}
        )
    losses = []
    for _ in range(STEPS):
        loss = model(*next(source))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if runtime is not None:
        runtime.close()  # rank 0 prints a table
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    dist.init_process_group("gloo")
    try:
        return compare(train, chosen.directory, rank=dist.get_rank())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
