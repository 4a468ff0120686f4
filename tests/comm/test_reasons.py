"""What users are told about messages that go uncompressed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ssdtrain
from ssdtrain.comm import Bucket
from ssdtrain.comm.notices import few_bytes_saved
from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime
from tests.comm.test_collectives import make, values
from tests.comm.test_policy import policy
from tests.support.logs import heard_warnings
from tests.support.ranks import on_ranks


def of_other_jobs(rank: int, comm: dict[str, Any]) -> list[str]:
    said = heard_warnings()
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


def exact_sums(rank: int, comm: dict[str, Any]) -> list[str]:
    said = heard_warnings()
    communicator = make(**comm)
    for _ in range(3):
        assert communicator.all_reduce(values(rank, 5000), "dp") is None
        communicator.all_gather(torch.empty(15000), values(rank, 5000), "zero_gather").wait()
        communicator.step_end()
    return said


def test_sums_that_a_preset_leaves_to_the_framework_are_told_only_if_named() -> None:
    assert on_ranks(3, exact_sums, {"preset": "exact"}) == [[], [], []]
    (text,), *_ = on_ranks(3, exact_sums, {"dp": "exact", "dp_gather": "exact", "zero_gather": "exact"})
    assert text.startswith("comm.dp compressed nothing in the first 3 steps: an exact sum of more than two")


def skipping(rank: int, skipped: int) -> list[str]:
    """Weights are gathered after a step, and not where it was skipped, as by the loss scale of float16 in the first ones."""
    said = heard_warnings()
    communicator = make(dp="int8", zero_gather="int8", tp="int8")
    shares = [values(rank, 1000), values(1 - rank, 1000)][:: 1 - 2 * rank]
    for step in range(50):
        communicator.all_reduce(values(rank, 5000), "dp").wait()
        if step >= skipped:
            work = communicator.gather_weights(torch.cat(shares), shares[rank], None, Bucket("weights"))
            work.wait()
        communicator.step_end(skipped=step < skipped)
    return said


def test_steps_that_are_skipped_are_none_of_the_first_ones() -> None:
    (text,), others = on_ranks(2, skipping, 5)
    assert text.startswith("comm.tp is configured, and nothing of it was sent") and others == []


def journalled(rank: int, path: str) -> list[Any]:
    with Runtime(load_config({"comm": {"dp": "int8", "probe": False}, "report": {"path": path}})) as runtime:
        for _ in range(3):
            assert runtime.comm.all_reduce(values(rank, 5000), "dp") is None
            runtime.step_end()
    lines = Path(path, f"rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line).get("decisions") for line in lines if "step" in json.loads(line)]


def test_the_journal_has_the_reasons_of_what_went_uncompressed(tmp_path: Path) -> None:
    reasons = ["comm.dp: some messages go uncompressed: smaller than min_bytes"]
    assert on_ranks(2, journalled, str(tmp_path)) == [[reasons, None, None]] * 2


MIB = 2**20
TABLE = [(19 * MIB, True), (MIB, False)]
GRADIENTS = {"dp": torch.float32, "dp_gather": torch.float32}
IN_BF16 = {"dp": torch.bfloat16, "zero_gather": torch.bfloat16}


@pytest.mark.parametrize(
    ("comm", "parameters", "dtypes", "share", "remedy"),
    [
        ({"preset": "balanced"}, [(4 * MIB, True), (4 * MIB, False)], GRADIENTS, None, ""),
        ({"preset": "balanced", "excluded": "raw"}, TABLE, GRADIENTS, 0.96, '"excluded": "bf16"'),
        ({"preset": "balanced", "excluded": "bf16"}, TABLE, GRADIENTS, None, ""),
        ({"preset": "balanced", "excluded": "raw"}, TABLE, IN_BF16, 0.98, '"norm", "bias"'),
        ({"preset": "balanced"}, TABLE, IN_BF16, None, ""),
        ({"preset": "exact"}, TABLE, GRADIENTS, None, ""),
        ({"preset": "balanced"}, [(1000, False)], GRADIENTS, 1.0, "min_bytes"),
        ({"dp": "bf16"}, [(4 * MIB, False)], IN_BF16, 1.0, "comm.dp is bf16.*comm.zero_gather is off"),
    ],
)
def test_a_job_that_saves_few_bytes_is_told_at_start_what_to_change(
    comm: dict[str, Any],
    parameters: list[tuple[int, bool]],
    dtypes: dict[str, torch.dtype],
    share: float | None,
    remedy: str,
) -> None:
    savings = few_bytes_saved(policy(**comm), False, parameters, dtypes)
    if share is None:
        assert savings is None
    else:
        assert round(savings[0], 2) == share and re.search(remedy, savings[1])


def with_a_large_table(rank: int) -> list[str]:
    said = heard_warnings()
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(16384, 64), nn.Linear(64, 8)))
    ssdtrain.attach(model, {"comm": {"preset": "balanced", "excluded": "raw"}}).close()
    return said


def test_a_model_that_is_mostly_a_table_is_told_at_start() -> None:
    (text,), others = on_ranks(2, with_a_large_table)
    assert text.startswith("comm sends about 100% of the plain bytes") and "excluded" in text
    assert others == []
