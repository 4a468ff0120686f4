"""Journals of all ranks are read as they were written, also while the last line is being written and after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain.config import load_config
from ssdtrain.metrics import Reduce, Unit
from ssdtrain.runtime import Runtime
from ssdtrain.tools.report.run import JournaledRun, ModuleUse, metric_named
from tests.support.journals import MiB, line, write


def test_values_of_ranks_become_one_as_the_metric_is_declared(tmp_path: Path) -> None:
    run = JournaledRun.read(write(tmp_path, ranks=3, steps=2))
    assert [journal.label for journal in run.journals] == ["rank 0", "rank 1", "rank 2"]
    assert run.over_ranks("ssd_bytes_written") == {1: 270 * MiB, 2: 270 * MiB}
    assert run.over_ranks("activation_peak_bytes") == {1: 32 * MiB, 2: 32 * MiB}
    assert run.over_ranks("ssd_life_seconds")[1] == 30 * 86400
    assert run.total("comm/dp/wire_bytes") == 60 * MiB
    assert run.waits() == {"layers.0.mlp": pytest.approx(0.06)}


def test_modules_are_those_of_the_last_step_that_has_them_summed_over_ranks_in_order(tmp_path: Path) -> None:
    directory = write(tmp_path, ranks=3, steps=5)
    used = {"module": "layers.2.mlp", "offloaded_bytes": 7, "kept_bytes": 1, "load_wait_seconds": 0.5}
    with (directory / "rank-2.jsonl").open("a") as stream:
        stream.write(json.dumps(line(6, modules=[used])) + "\n")
    run = JournaledRun.read(directory)
    assert [journal.modules_step for journal in run.journals] == [4, 4, 6]
    assert list(run.modules()) == ["layers.0.mlp", "layers.2.mlp", "layers.10.mlp"]
    assert run.modules()["layers.2.mlp"] == ModuleUse(34 * MiB + 7, 2 * MiB + 1, 0.5)


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, ranks=1, steps=2)
    with (tmp_path / "rank-0.jsonl").open("a") as stream:
        stream.write('{"step": 3, "saved_by')
    assert JournaledRun.read(tmp_path).steps == [1, 2]


def test_a_step_trained_again_after_a_restart_has_its_last_values_and_totals_have_both(
    tmp_path: Path,
) -> None:
    write(tmp_path, ranks=1, steps=4)
    with (tmp_path / "rank-0.jsonl").open("a") as stream:
        stream.write(json.dumps(line(4, step_seconds=9.0)) + "\n")
    run = JournaledRun.read(tmp_path)
    assert run.steps == [1, 2, 3, 4]
    assert run.over_ranks("step_seconds")[4] == 9.0
    assert run.total("saved_bytes") == 500 * MiB


def test_journals_in_folders_of_ranks_and_of_a_second_engine_are_found(tmp_path: Path) -> None:
    write(tmp_path / "node0", ranks=1)
    write(tmp_path / "node1", ranks=1)
    (tmp_path / "node1" / "rank-0.jsonl").rename(tmp_path / "node1" / "rank-1.2.jsonl")
    assert [j.label for j in JournaledRun.read(tmp_path).journals] == ["rank 0", "rank 1, engine 2"]


@pytest.mark.parametrize(
    ("name", "unit", "counts", "ranks"),
    [
        ("ssd_bytes_written", Unit.BYTES, True, Reduce.SUM),
        ("activation_peak_bytes", Unit.BYTES, False, Reduce.MAX),
        ("comm/dp/wait_seconds", Unit.SECONDS, True, Reduce.MAX),
        ("somebody/else_bytes", Unit.BYTES, False, Reduce.MAX),
        ("loss", Unit.COUNT, False, Reduce.MAX),
    ],
)
def test_metrics_are_known_as_they_were_declared(name: str, unit: Unit, counts: bool, ranks: Reduce) -> None:
    metric = metric_named(name)
    assert (metric.unit, metric.cumulative, metric.ranks) == (unit, counts, ranks)


def test_a_real_run_can_be_read_with_the_loss_that_it_logged(tmp_path: Path) -> None:
    config = {
        "offload": {"directories": str(tmp_path / "slabs"), "min_bytes": "1KiB"},
        "report": {"path": str(tmp_path / "report"), "interval": 0},
    }
    x = torch.randn(64, 64, requires_grad=True)
    with Runtime(load_config(config)) as runtime:
        for step in range(3):
            with runtime.step():
                with runtime.forward():
                    loss = x.sin().cos().sum()
                loss.backward()
                runtime.log_values(loss=2.0 - step if step < 2 else float("nan"))
        saved = runtime.statistics()
    run = JournaledRun.read(tmp_path / "report")
    assert run.over_ranks("loss") == {1: 2.0, 2: 1.0}  # NaN is no JSON
    assert run.total("saved_bytes") == saved.offload.saved_bytes


@pytest.mark.parametrize("section", ["plan", "amount"])
def test_what_was_decided_and_why_is_in_the_journal_once(section: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"report": {"path": str(tmp_path / "report"), "interval": 0}}
    if section == "plan":
        config["plan"] = "auto"
    else:
        config["offload"] = {"directories": str(tmp_path / "slabs"), "min_bytes": "1KiB", "amount": "auto"}
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x).tanh()).tanh())  # type: ignore[assignment]
    with ssdtrain.attach(model, config) as runtime:
        for number in range(400):
            with runtime.step():
                model(torch.randn(64, 64)).square().mean().backward()
            # On a busy machine steps of a millisecond may be planned for several times before a plan is followed long enough.
            if number >= 13 and any(feature.decisions() for feature in runtime.features):
                break
    (journal,) = JournaledRun.read(tmp_path / "report").journals
    assert 1 <= len(journal.decisions) < 7
    step, text = journal.decisions[0]
    assert step >= 2 and "peak" in text and "keep" in text
