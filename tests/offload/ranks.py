"""One rank of a data-parallel training on gloo, as `tests.offload.test_ranks` starts it.

    RANK=... WORLD_SIZE=... python -m tests.offload.ranks DIRECTORY SCENARIO...

Prints for every scenario one JSON object with the bits of every loss and of the final weights.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ssdtrain.config import load_config
from ssdtrain.features import Placement
from ssdtrain.runtime import Runtime, Seams
from ssdtrain.storage import Faults
from tests.offload.conftest import settled
from tests.offload.zoo import Gpt

STEPS = 4
PLANNED = 12
"""Steps within which the first plan is made."""
SICK = 1
"""The rank that has the bad drive."""

NO_PLAN = "a limit that no plan meets"

SCENARIOS: dict[str, tuple[dict[str, Any], Faults | None]] = {
    "plain": ({}, None),
    "full": ({"capacity": "64KiB"}, None),
    "failing writes": ({}, Faults(fail_writes=frozenset({5}))),
    "raise when full": ({"capacity": "64KiB", "on_full": "raise"}, None),
    "failing reads": ({}, Faults(fail_reads=frozenset({20}))),
    NO_PLAN: ({}, None),
}


def runtime_of(scenario: str, directory: str, rank: int, world: int) -> Runtime:
    options, faults = SCENARIOS[scenario] if rank == SICK else ({}, None)
    section = {"directories": f"{directory}/{rank}", "min_bytes": 1024, **options}
    plan = {"plan": {"device_limit": "1KiB"}} if scenario == NO_PLAN and rank == SICK else {}
    config = load_config({"offload": section, **plan})
    return Runtime(config, Placement.of("cpu", rank, rank, world), seams=Seams(faults), logs=False)


def train(scenario: str, directory: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Gpt()
    runtime = None if scenario == "plain" else runtime_of(scenario, directory, rank, world)
    if runtime is not None:
        runtime.register(model)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shown = []
    for step in range(STEPS if scenario != NO_PLAN else PLANNED):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * world + rank)
        tokens = torch.randint(97, (2, 32), generator=generator)
        with runtime.forward() if runtime is not None else nullcontext():
            loss = parallel(tokens).square().mean()
        if runtime is not None:
            settled(runtime)
        loss.backward()
        optimizer.step()
        shown.append(loss.item().hex())
    shown.append(float(sum(p.detach().double().sum() for p in model.parameters())).hex())
    found = {"scenario": scenario, "rank": rank, "losses": shown}
    if runtime is not None:
        statistics = runtime.statistics()
        found |= {"kept": statistics.offload.kept_full_bytes, "loaded": statistics.offload.loaded_bytes}
        runtime.close()
    return found


def main(directory: str, *scenarios: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in scenarios:
        print(json.dumps(train(scenario, directory)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
