"""One rank of DistributedDataParallel with compact.mode "lowrank": `python -m tests.compact.lowrank_ranks FILE`.

Rank 0 also trains both ranks' batches alone, which is written to FILE.0.plain.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ssdtrain.config import ConfigError
from tests.compact.test_lowrank import OPTIMIZERS, attach, batch, llama, train

STEPS = 5


def main(file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = llama()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    with pytest.raises(ConfigError, match=r"compact.mode: 'lowrank' meets DistributedDataParallel"):
        attach(DistributedDataParallel(llama()), optimizer)
    runtime = attach(model, optimizer)
    wrapped = DistributedDataParallel(model)
    reduced = 0

    def reduce(state, bucket):  # DDP reads annotations, which are strings here
        nonlocal reduced
        reduced += bucket.buffer().nbytes
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, reduce)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(*batch(2 * step + rank)).backward()
        optimizer.step()
        if rank == 0:
            wrapped.module.state_dict()  # one rank saves, and all go on as the same
    weights = wrapped.module.state_dict()
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    torch.save({"weights": weights, "reduced": reduced, "expected_bytes": STEPS * trained}, f"{file}.{rank}")
    runtime.close()
    if rank == 0:
        alone = llama()
        optimizer = OPTIMIZERS["AdamW"](alone.parameters())
        with attach(alone, optimizer):
            train(alone, optimizer, range(STEPS))
            torch.save(alone.state_dict(), f"{file}.0.plain")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
