"""The journal writes what each step added, for every rank, and logs means on rank 0."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
import torch

from ssdtrain.config import ConfigError, load_config
from ssdtrain.features import Placement
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry import journal
from ssdtrain.telemetry.journal import Journal
from ssdtrain.tools.report.run import JournaledRun

SIZE = 128


def run(tmp_path: Path, report: dict[str, object], steps: int = 6, rank: int = 0) -> None:
    config = {
        "offload": {"directories": str(tmp_path / "slabs"), "amount": "all", "min_bytes": "1KiB"},
        "report": report,
    }
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with Runtime(load_config(config), Placement.of("cpu", rank)) as runtime:
        for _ in range(steps):
            step(runtime, x)


def step(runtime: Runtime, x: torch.Tensor) -> None:
    with runtime.step():
        with runtime.forward():
            loss = x.sin().cos().sum()
        loss.backward()


def test_every_rank_writes_a_line_a_step_with_what_the_step_added(tmp_path: Path) -> None:
    for rank in range(2):
        run(tmp_path, {"path": str(tmp_path / "report-{rank}"), "interval": 0}, rank=rank)
        lines = [
            json.loads(line)
            for line in (tmp_path / f"report-{rank}" / f"rank-{rank}.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        # x and its sine, each step the same.
        assert all(line["saved_bytes"] == 2 * SIZE * SIZE * 4 for line in lines)
        assert all(line["step_seconds"] > 0 for line in lines)
        moved = [line["offloaded_bytes"] + line["avoided_write_bytes"] for line in lines]
        assert all(0 < m <= 2 * 2 * SIZE * SIZE * 4 for m in moved)


def test_rank_0_logs_every_interval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssdtrain"):
        run(tmp_path, {"interval": 3})
        run(tmp_path, {"interval": 3}, rank=1)
        run(tmp_path, {"interval": 0})
    lines = [text for record in caplog.records if "] step " in (text := record.getMessage())]
    assert [line.split(" | ")[0] for line in lines] == ["[ssdtrain] step 3", "[ssdtrain] step 6"]
    assert all("saved for backward/step: 128 KiB" in line for line in lines)  # means, and not totals


def test_a_directory_that_cannot_be_made_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ssdtrain\.report\.path"):
        run(tmp_path, {"path": str(tmp_path / "file" / "report")})


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def full_file(_: Path) -> TextIO:
    return Path("/dev/full").open("a")


def test_a_full_disk_ends_the_report_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report"
    file = report / "rank-0.jsonl"
    with monkeypatch.context() as full:
        full.setattr(journal, "open_to_append", full_file)
        run(tmp_path, {"path": str(report), "interval": 0})
    (warning,) = warnings_of(caplog)
    assert (
        "report.path" in warning and "No space left on device" in warning and "another directory" in warning
    )
    run(tmp_path, {"path": str(report), "interval": 0})  # the name is free again
    assert len(file.read_text().splitlines()) == 6


def test_a_report_that_cannot_be_written_leaves_the_users_exception_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report"
    monkeypatch.setattr(journal, "open_to_append", full_file)
    config = {"offload": {"directories": str(tmp_path / "slabs")}, "report": {"path": str(report)}}
    with Runtime(load_config(config)) as runtime, pytest.raises(ZeroDivisionError), runtime.step():
        raise ZeroDivisionError


def link_to_another_file(file: Path) -> None:
    (file.parent / "victim").write_text("precious")
    file.symlink_to(file.parent / "victim")


def second_name_of_another_file(file: Path) -> None:
    (file.parent / "victim").write_text("precious")
    os.link(file.parent / "victim", file)


@pytest.mark.parametrize(
    "prepare", [link_to_another_file, second_name_of_another_file, os.mkfifo, Path.mkdir]
)
def test_what_somebody_left_in_place_of_the_journal_is_an_error_at_start(
    prepare: Callable[[Path], None], tmp_path: Path
) -> None:
    """A FIFO would block who opens it for writing."""
    report = tmp_path / "report"
    report.mkdir()
    prepare(report / "rank-0.jsonl")
    with pytest.raises(
        ConfigError, match=r"ssdtrain\.report\.path: .*rank-0\.jsonl is a link, no regular file"
    ):
        run(tmp_path, {"path": str(report)})
    if (report / "victim").exists():
        assert (report / "victim").read_text() == "precious"


def test_a_journal_of_another_user_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's owner may have it: a network file system gives the files of root to somebody else."""
    report, fstat = {"path": str(tmp_path / "report"), "interval": 0}, os.fstat
    run(tmp_path, report)
    with monkeypatch.context() as squashed:
        squashed.setattr("os.geteuid", lambda: os.getuid() + 1)
        run(tmp_path, report)
    with monkeypatch.context() as foreign:
        foreign.setattr(
            "os.fstat", lambda fd: os.stat_result((*fstat(fd)[:4], os.getuid() + 1, *fstat(fd)[5:]))
        )
        with pytest.raises(ConfigError, match="another user's"):
            run(tmp_path, report)


def test_files_of_a_run_can_be_read_by_this_user_alone(tmp_path: Path) -> None:
    run(tmp_path, {"path": str(tmp_path / "report"), "interval": 0, "trace": [2]})
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "report").iterdir()}
    assert modes == {"rank-0.jsonl": 0o600, "trace-rank-0.json": 0o600}


class NoEnd(io.StringIO):
    """A file of which the last bytes cannot be written."""

    def close(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_cannot_be_closed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    closing = Journal(tmp_path, 0, 0)
    closing._stream.close()
    closing._stream = NoEnd()
    closing.close()
    closing.close()
    (warning,) = warnings_of(caplog)
    assert "rank-0.jsonl could not be closed" in warning and "Input/output error" in warning


def test_a_second_runtime_of_the_process_writes_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def made(directory: Path) -> Runtime:
        offload = {"directories": str(tmp_path / "slabs"), "min_bytes": "1KiB"}
        return Runtime(
            load_config({"offload": offload, "report": {"path": str(directory / "report"), "interval": 0}})
        )

    def steps_in(name: str) -> list[int]:
        lines = (tmp_path / "report" / name).read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    with made(tmp_path) as one, made(tmp_path / "link") as two, made(tmp_path):
        for runtime in (one, two, one):
            step(runtime, x)
    with made(
        tmp_path
    ) as later:  # those files are closed: this goes on with the first, as a restarted run does
        step(later, x)
    assert steps_in("rank-0.jsonl") == [1, 2, 1]
    assert steps_in("rank-0.1.jsonl") == [1]
    assert steps_in("rank-0.2.jsonl") == []


def test_values_of_the_script_are_numbers_with_names_of_their_own(tmp_path: Path) -> None:
    """A loss is often given as a tensor, and `step` as a value; neither may end the training later, or change SSDTrain's own."""
    with Runtime(load_config({"offload": {"host": "1MiB"}, "report": {"path": str(tmp_path)}})) as runtime:
        with runtime.step():
            runtime.log_values(
                loss=torch.tensor(2.5, requires_grad=True) * 1, rate=torch.tensor([3]), on=True
            )
            for name in ("step", "modules", "step_seconds", "saved_bytes"):
                with pytest.raises(ValueError, match=f"log_values: {name} is a name of SSDTrain's own"):
                    runtime.log_values(**{name: 7})
            for value in ("x", None, torch.ones(2)):
                with pytest.raises(ValueError, match="log_values: loss is not a number"):
                    runtime.log_values(loss=value)  # type: ignore[arg-type]
    [line] = [json.loads(text) for text in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert (line["step"], line["loss"], line["rate"], line["on"]) == (1, 2.5, 3.0, 1.0)


def test_values_that_come_after_the_end_of_their_step_are_of_that_step(tmp_path: Path) -> None:
    with Runtime(load_config({"offload": {"host": "1MiB"}, "report": {"path": str(tmp_path)}})) as runtime:
        for loss in (2.5, 1.5):
            runtime.step_begin()
            runtime.step_end()
            runtime.log_late_values(loss=loss)
    run = JournaledRun.read(tmp_path)
    (journal,) = run.journals
    assert {step: values["loss"] for step, values in journal.by_step.items()} == {1: 2.5, 2: 1.5}
    assert journal.lines == 2 and all("step_seconds" in values for values in journal.by_step.values())
