"""A training script as somebody has it: it has never heard of SSDTrain. Prints one JSON line.

script.py [--local_rank N] CONFIG.json
"""

import argparse
import json
import os
import sys

import deepspeed
import torch

from tests.deepspeed import models, upstream

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("config")
args = parser.parse_args()

upstream.repair()
torch.set_num_threads(1)
torch.manual_seed(0)
model = models.GPT()
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=args.config
)
losses = []
for ids, labels in models.batches(1 + engine.global_rank, 3):
    loss = engine(ids, labels)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())

attachment = engine.__dict__.get("ssdtrain_attachment")
found = {
    "rank": engine.global_rank,
    "ranks": engine.world_size,
    "local_rank": args.local_rank,
    "name": __name__,
    "losses": losses,
    "saved_bytes": attachment.runtime.statistics().offload.saved_bytes if attachment is not None else None,
    "argv0": sys.argv[0],
}
# One write, on a line of its own: other ranks have the same standard output.
os.write(1, f"\nRESULT {json.dumps(found)}\n".encode())
torch.distributed.barrier()
torch.distributed.destroy_process_group()
