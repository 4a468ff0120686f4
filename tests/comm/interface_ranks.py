"""One of two ranks on two nodes: runs calls plainly or through a communicator, as it is told."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.two_nodes.ranks import CHANNEL
from ssdtrain.comm import Bucket
from tests.comm.test_bytes import waited
from tests.comm.test_collectives import make, values

SHARE = 300_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of a table that fills the first shard and a part of the second, of small ones, and of all.
EXCLUDED = {
    "none": (),
    "table": ((0, SHARE + 40_000),),
    "norms": tuple((at, at + 128) for at in range(0, 2 * SHARE, 20_000)),
    "all": ((0, 2 * SHARE),),
}
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "weights")


def main() -> None:
    channel = os.fdopen(int(os.environ[CHANNEL]), "w")
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    comm = make(dp="int8", dp_gather="int8", zero_gather="int8")
    weights: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        command = json.loads(line)["command"]
        if command not in ("finish", "ready"):
            kind, dtype, excluded, way = command.split()
            bucket = Bucket(command, EXCLUDED[excluded])
            call(comm if way == "compressed" else None, kind, DTYPES[dtype], bucket, rank, weights)
        print(json.dumps({}), file=channel, flush=True)
        if command == "finish":
            break


def call(
    comm: Any, kind: str, dtype: torch.dtype, bucket: Bucket, rank: int, weights: dict[str, torch.Tensor]
) -> None:
    own = slice(rank * SHARE, (rank + 1) * SHARE)
    whole = weights.setdefault(bucket.name, values(rank, 2 * SHARE, dtype))
    if kind == "all_reduce":
        if not (comm and waited(comm.all_reduce(whole, "dp", bucket=bucket))):
            dist.all_reduce(whole)
    elif kind == "reduce_scatter":
        out = torch.empty(SHARE, dtype=dtype)
        if not (comm and waited(comm.reduce_scatter(out, whole, "dp", bucket=bucket))):
            dist.reduce_scatter_tensor(out, whole)
    elif kind == "weights":
        if not (comm and waited(comm.gather_weights(whole, whole[own], None, bucket))):
            dist.all_gather_into_tensor(whole, whole[own].clone())
    elif not (comm and waited(comm.all_gather(whole, whole[own], "zero_gather", None, bucket))):
        dist.all_gather_into_tensor(whole, whole[own].clone())


if __name__ == "__main__":
    main()
