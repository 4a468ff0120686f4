"""One rank of the matrix of collectives: every row without comm and in several ways with it, and what happens beside
ordinary steps, in the same processes.

Started by `test_comm.py` as `python -m tests.megatron.comm_matrix DIRECTORY [name of a row or case ...]`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

from tests.megatron import cpu  # noqa: E402

cpu.arrange()

import megatron.core  # noqa: E402, F401

cpu.finish()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402

import ssdtrain_megatron  # noqa: E402
from ssdtrain_megatron import _compat, _compat_comm  # noqa: E402
from tests.megatron import comm_cases  # noqa: E402
from tests.megatron.comm_rows import CASES, ROWS, WAYS, CommRow  # noqa: E402
from tests.megatron.training import Trainer, layout  # noqa: E402

OPEN = {"min_bytes": 0, "probe": False, "warmup_steps": 0}


def functions() -> list[int]:
    """Identities of all that is ever replaced."""
    places = [*_compat.replaceable().values(), *_compat_comm.places().values()]
    return [id(vars(place.owner)[place.name]) for found in places for place in found]


def shared(trainer: Trainer) -> dict[str, str]:
    """Digests of what other ranks hold too, by who they are: data-parallel replicas, tensor-parallel ranks, stages."""
    digests = {kind: hashlib.sha256() for kind in ("replica", "tensor", "tied")}
    for chunk in trainer.chunks:
        for _, parameter in sorted(chunk.named_parameters()):
            content = parameter.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
            if not _compat_comm.is_expert(parameter):
                digests["replica"].update(content)
                if not getattr(parameter, "tensor_model_parallel", False):
                    digests["tensor"].update(content)
            if getattr(parameter, "shared_embedding", False):
                digests["tied"].update(content)
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def steps(trainer: Trainer, row: CommRow) -> list[tuple[str | None, str]]:
    found = [trainer.step(number) for number in range(row.steps)]
    if row.row.ddp.get("overlap_param_gather"):
        # The last step's parameters are gathered by the next forward, which does not come.
        for chunk in trainer.chunks:
            chunk.start_param_sync(force_sync=True)
    return found


def known(row: CommRow) -> bool:
    """Whether this version of Megatron has the options."""
    return set(row.row.ddp) <= {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}


def run(row: CommRow, way: str, directory: str) -> dict[str, Any]:
    trainer = Trainer(row.row)
    before = functions()
    found: dict[str, Any] = {}
    began = time.perf_counter()
    if way == "plain":
        found["steps"] = steps(trainer, row)
    else:
        config: dict[str, Any] = {"comm": {**OPEN, **WAYS[way]}}
        if way == "raw, offload":
            config["offload"] = {"directories": directory, "min_bytes": 1024}
        with ssdtrain_megatron.attach(trainer.chunks, config, optimizer=trainer.optimizer) as attachment:
            replaced = functions()
            found["steps"] = steps(trainer, row)
            statistics, comm = attachment.statistics(), attachment.runtime.comm
            found["figures"] = {
                name: {**vars(figures), "fallbacks": dict(figures.fallbacks)}
                for name, figures in statistics.comm.items()
            }
            found["residual_bytes"] = comm.feedback.nbytes if comm.feedback is not None else 0
            found["counted_steps"] = [statistics.steps, comm.steps]
            found["spilled"] = statistics.offload.offloaded_bytes + statistics.offload.avoided_write_bytes
        found["replaced"] = sum(a != b for a, b in zip(before, replaced, strict=True))
        found["put_back"] = functions() == before and "step" not in vars(trainer.optimizer)
    found["seconds"] = time.perf_counter() - began
    found["weights"] = trainer.weights()
    found["shared"] = shared(trainer)
    return found


def main(directory: str, *names: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    # Every rank on a node of its own: presets compress less inside of one.
    os.environ["SSDTRAIN_NODE"] = f"node{rank}"
    cpu.join()
    results: dict[str, Any] = {}
    for row in ROWS:
        if row.row.world != int(world) or (names and row.row.name not in names) or not known(row):
            continue
        with layout(row.row):
            result = {way: run(row, way, directory) for way in ("plain", *row.ways)}
            result["ranks"] = {
                "replica": dist.get_process_group_ranks(parallel_state.get_data_parallel_group()),
                "tensor": dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()),
                "tied": dist.get_process_group_ranks(
                    parallel_state.get_embedding_group(False) or dist.group.WORLD
                )
                if row.row.pp > 1 and parallel_state.is_rank_in_embedding_group()
                else [int(rank)],
            }
        results[row.row.name] = result
        Path(directory, f"{world}-{rank}.json").write_text(json.dumps(results))
    if int(world) == 2:
        for name in CASES:
            if not names or name in names:
                results[name] = getattr(comm_cases, name)(directory)
        Path(directory, f"{world}-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
