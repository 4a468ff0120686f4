"""One rank of the matrix: every row without and with offload, one after the other in the same processes.

Started by `test_matrix.py` as `python -m tests.megatron.matrix DIRECTORY [name of a row ...]`, in the environment that
torchrun would make.
"""

from __future__ import annotations

import dataclasses
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
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

import ssdtrain_megatron  # noqa: E402
from tests.megatron.count import Count  # noqa: E402
from tests.megatron.rows import ROWS, Row  # noqa: E402
from tests.megatron.training import STEPS, Trainer, layout  # noqa: E402
from tests.support.ended import ended  # noqa: E402

MIN_BYTES = 1024


def auxiliary_losses() -> dict[str, list[float]]:
    """What the layers of a mixture of experts have logged since this was asked last."""
    found = {
        name: entry["values"].tolist()
        for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()
    }
    moe_utils.clear_aux_losses_tracker()
    return found


def train(trainer: Trainer) -> list[tuple[str | None, str]]:
    """Losses and norms of the steps, and of an evaluation after each where the row has them."""
    found = []
    for number in range(trainer.row.steps):
        found.append(trainer.step(number))
        if trainer.row.evaluated:
            with torch.no_grad():
                found.append(trainer.step(number, forward_only=True))
    return found


def plain_run(row: Row) -> dict[str, Any]:
    if row.reference is not None:
        row = dataclasses.replace(row, options=row.reference)
    trainer = Trainer(row)
    steps = train(trainer)
    weights, auxiliary = trainer.weights(), auxiliary_losses()
    # Counting takes hooks of its own, below which some of Megatron's functions go wrong: what it trains is not looked at.
    trainer = Trainer(row)
    count = Count(trainer.chunks, MIN_BYTES)
    if row.counted:
        with count.counting(schedules):
            for number in range(STEPS):
                trainer.step(number)
        auxiliary_losses()
    return {
        "steps": steps,
        "weights": weights,
        "auxiliary": auxiliary,
        "saved": count.calls,
        "at_once": count.followed_at_once(len(count.calls) // STEPS),
    }


def offloaded_run(row: Row, directory: str) -> dict[str, Any]:
    trainer = Trainer(row)
    config: dict[str, Any] = {
        "offload": {"directories": directory, "amount": "all", "min_bytes": MIN_BYTES, **row.offload},
        "checkpoint": row.checkpoint,
    }
    if row.plan is not None:
        config["plan"] = row.plan
    if not row.tiers:
        del config["offload"]
    before = schedules.forward_step
    chunks = trainer.chunks[::-1] if row.reversed else trainer.chunks
    with ssdtrain_megatron.attach(chunks, config) as attachment:
        replaced = schedules.forward_step is not before
        steps = train(trainer)
        weights = trainer.weights()
        found = ended(attachment.statistics)
        offload = found.offload
        return {
            "steps": steps,
            "weights": weights,
            "auxiliary": auxiliary_losses(),
            "replaced": replaced,
            "counted_steps": found.steps,
            "spilled": offload.offloaded_bytes + offload.avoided_write_bytes,
            "kept": offload.kept_bytes,
            "kept_for_want": offload.kept_full_bytes + offload.kept_late_bytes,
            "saved": offload.saved_bytes,
            "plans": found.values().get("auto/plans", 0) + found.values().get("plan/plans", 0),
            "recomputed": found.values().get("plan/recomputed_blocks", 0),
            "encoded": offload.kept_encoded_bytes,
            "live_regions": offload.live_regions,
            "live_slots": found.store.live_slots,
            "loaded": offload.loaded_bytes,
            "forwarded": offload.forwarded_bytes,
            "cancelled": offload.avoided_write_bytes,
        }


def run(row: Row, directory: str) -> dict[str, Any]:
    began = time.perf_counter()
    with layout(row):
        plain = plain_run(row)
        middle = time.perf_counter()
        offloaded = offloaded_run(row, directory)
    ended = time.perf_counter()
    return {"plain": plain, "offloaded": offloaded, "seconds": [middle - began, ended - middle]}


def main(directory: str, *names: str) -> None:
    torch.set_num_threads(1)
    # One generator plays the parts of two here, which Megatron notices with every dropout.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    cpu.join()
    results = {}
    for row in ROWS:
        if row.world != int(world) or (names and row.name not in names):
            continue
        try:
            results[row.name] = run(row, directory)
        except BaseException:
            # The other ranks are in the middle of this row: there is no way to go on with the next.
            print(f"rank {rank} failed in the row {row.name!r}", flush=True)
            raise
        Path(directory, f"{world}-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
