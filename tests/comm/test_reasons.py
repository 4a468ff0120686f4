"""What users are told about messages that go uncompressed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.comm import Bucket
from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime
from tests.comm.test_collectives import make, values
from tests.support.ranks import on_ranks


def of_other_jobs(rank: int, comm: dict[str, Any]) -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ssdtrain").addHandler(handler)
    communicator = make(**comm)
    messages = communicator.point_to_point
    for _ in range(3):
        communicator.all_reduce(values(rank, 5000), "dp").wait()
        if rank == 0 and "pp_forward" in comm:
            messages.send(torch.ones(2000), "pp_forward", 1, lambda payload: dist.isend(payload, 1)).wait()
        elif "pp_forward" in comm:
            messages.receive(
                torch.empty(2000), "pp_forward", 0, lambda payload: dist.irecv(payload, 0)
            ).wait()
        communicator.step_end()
    return said


def test_a_dimension_that_is_configured_by_name_and_not_there_is_told() -> None:
    named = {"dp": "int8", "dp_gather": "int8", "pp_forward": "int8"}
    assert on_ranks(2, of_other_jobs, named) == [[], []]
    assert on_ranks(2, of_other_jobs, {"preset": "balanced"}) == [[], []]
    (text,), others = on_ranks(2, of_other_jobs, {**named, "tp": "off/int8"})
    assert text.startswith("comm.tp is configured, and nothing of it was sent") and others == []


def skipping(rank: int, skipped: int) -> list[str]:
    """Weights are gathered after a step, and not where it was skipped, as by the loss scale of float16 in the first ones."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ssdtrain").addHandler(handler)
    communicator = make(dp="int8", zero_gather="int8", tp="int8")
    shares = [values(rank, 1000), values(1 - rank, 1000)][:: 1 - 2 * rank]
    for step in range(50):
        communicator.all_reduce(values(rank, 5000), "dp").wait()
        if step >= skipped:
            work = communicator.gather_weights(torch.cat(shares), shares[rank], None, Bucket("weights"))
            assert work is not None
            work.wait()
        communicator.step_end(skipped=step < skipped)
    return said


def test_steps_that_are_skipped_are_none_of_the_first_ones() -> None:
    (text,), others = on_ranks(2, skipping, 5)
    assert text.startswith("comm.tp is configured, and nothing of it was sent") and others == []


def journalled(rank: int, path: str) -> list[Any]:
    runtime = Runtime(load_config({"comm": {"dp": "int8", "probe": False}, "report": {"path": path}}))
    assert runtime.comm is not None
    for _ in range(3):
        assert runtime.comm.all_reduce(values(rank, 5000), "dp") is None
        runtime.step_end()
    runtime.close()
    lines = Path(path, f"rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line).get("decisions") for line in lines if "step" in json.loads(line)]


def test_the_journal_has_the_reasons_of_what_went_uncompressed(tmp_path: Path) -> None:
    reasons = ["comm.dp: some messages go uncompressed: smaller than min_bytes"]
    assert on_ranks(2, journalled, str(tmp_path)) == [[reasons, None, None]] * 2
