"""What a user is told: DeepSpeed's monitor and log, and hooks inside the model that take what would have been offloaded."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import logger as deepspeed_logger
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ssdtrain_ds
from tests.deepspeed import models
from tests.deepspeed.conftest import MakeEngine, train
from tests.support.tensors import all_equal


def rows_of(file: Path) -> list[list[str]]:
    with file.open() as lines:
        return list(csv.reader(lines))[1:]


def test_the_csv_monitor_has_a_line_for_every_step(make_engine: MakeEngine, tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}
    engine = make_engine(csv_monitor=monitor)
    train(engine, 3)
    files = {
        file.stem.removeprefix("Train_SSDTrain_"): file
        for file in (tmp_path / "csv" / "job").glob("*SSDTrain*")
    }
    assert {"offloaded_bytes", "activation_peak_bytes", "load_wait_seconds", "ssd_bytes_written"} <= set(
        files
    )
    steps = {name: rows_of(file) for name, file in files.items()}
    # Against the samples seen, as DeepSpeed's own figures.
    assert [int(row[0]) for row in steps["offloaded_bytes"]] == [models.BATCH * step for step in (1, 2, 3)]
    runtime = ssdtrain_ds.runtime_of(engine)
    found = runtime.statistics()
    assert found is not None
    for name in ("offloaded_bytes", "avoided_write_bytes", "kept_bytes"):
        assert sum(float(row[1]) for row in steps[name]) == getattr(found.offload, name)
    assert float(steps["activation_peak_bytes"][-1][1]) > 0


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The numbers of the steps that got a log line."""
    texts = [record.getMessage() for record in caplog.records if record.name == "ssdtrain.report"]
    return [text.split(" | ")[0].removeprefix("[ssdtrain] step ") for text in texts if " step " in text]


@pytest.mark.parametrize("steps_per_print", [None, 1, 2, 10**9, float("inf")])
def test_the_log_has_a_line_every_report_interval_whatever_deepspeed_logs(
    steps_per_print: float | None, make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSpeed's logger stays at WARNING, its default; `inf` is accelerate's."""
    block = {
        "offload": {"directories": str(tmp_path / "ssd"), "amount": "all", "min_bytes": 1024},
        "report": {"interval": 2},
    }
    assert deepspeed_logger.level >= logging.WARNING
    engine = make_engine(block, steps_per_print=steps_per_print)
    train(engine, 5)
    assert reports(caplog) == ["2", "4"]
    assert "offloaded/step: " in caplog.text or "writes avoided/step: " in caplog.text


def test_an_interval_of_zero_logs_nothing(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    block = {"offload": {"directories": str(tmp_path / "ssd")}, "report": {"interval": 0}}
    train(make_engine(block, steps_per_print=1), 2)
    assert reports(caplog) == []


def test_the_log_counts_steps_as_deepspeed_does(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    block = {"offload": {"directories": str(tmp_path / "ssd")}, "report": {"interval": 1}}
    engine = make_engine(block)
    engine.global_steps = 40  # as `load_checkpoint` leaves it
    train(engine, 2)
    assert reports(caplog) == ["41", "42"]


class Wrapped(nn.Module):
    """A block inside somebody else's hooks."""

    def __init__(self, hooks: Any) -> None:
        super().__init__()
        self.block = models.Block()
        self.hooks = hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.hooks():
            return self.block(x)


def wrapped(hooks: Any) -> models.GPT:
    model = models.GPT()
    model.blocks[1] = Wrapped(hooks)
    return model


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "ssdtrain"]


def keep_all(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def keeping() -> saved_tensors_hooks:
    return saved_tensors_hooks(keep_all, keep_all)


def test_hooks_inside_the_model_win_and_what_they_take_is_reported(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    plain_enter = saved_tensors_hooks.__enter__
    whole, part = make_engine(), make_engine(model=wrapped(keeping))
    train(whole, 5)
    assert not ours(caplog)
    train(part, 5)
    (record,) = ours(caplog)
    assert (
        "tests.deepspeed.test_monitor.keep_all" in record.getMessage()
        and "bytes a step" in record.getMessage()
    )
    bytes_of = []
    for engine in (whole, part):
        runtime = ssdtrain_ds.runtime_of(engine)
        found = runtime.statistics()
        bytes_of.append(found.offload.saved_bytes)
    assert bytes_of[1] < bytes_of[0]
    assert saved_tensors_hooks.__enter__ is plain_enter


def test_recomputation_is_no_lost_coverage(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    model = models.GPT(lambda block, x: checkpoint(block, x, use_reentrant=False))
    train(make_engine(model=model), 4)
    assert not ours(caplog)


def test_a_model_whose_hooks_take_everything_is_told_so(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    forward = engine.module.forward

    def inside(*args: Any) -> Any:
        with keeping():
            return forward(*args)

    engine.module.forward = inside
    train(engine, 4)
    assert "no saved tensor was seen" in caplog.text and "keep_all" in caplog.text


class Sparse(nn.Module):
    """Saves a sparse matrix for backward, which has no `nbytes`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(keep_all, keep_all):
            rows = x.flatten(0, 1)
            return torch.sparse.mm(torch.eye(len(rows)).to_sparse(), rows * 2).view_as(x)


def test_hooks_inside_the_model_may_take_sparse_tensors(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def model() -> models.GPT:
        torch.manual_seed(0)
        found = models.GPT()
        found.blocks[1] = Sparse()
        return found

    plain = train(make_engine(None, model=model()), 4)
    assert all_equal(plain, train(make_engine(model=model()), 4))
