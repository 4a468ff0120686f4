"""Residuals in checkpoints: complete files only, and the same verdict on every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ssdtrain.comm import Communicator, Policy
from ssdtrain.config import load_config
from ssdtrain.integration import residuals
from tests.support.ranks import on_ranks

LAYOUT = {"dp": 1, "tp": 1}


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    ours = not dist.is_initialized()  # tests of frameworks in this process have a group of one already
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = load_config({"comm": {"preset": "balanced"}}).comm
    yield Policy.from_config(config)
    if ours:
        dist.destroy_process_group()


def communicator(policy: Policy, steps: int = 0) -> Communicator:
    comm = Communicator(policy)
    comm.steps = steps
    return comm


def test_what_was_saved_is_taken_and_no_partial_file_is_left(policy: Policy, tmp_path: Path) -> None:
    file = tmp_path / "step" / "rank_0.pt"
    residuals.save(communicator(policy, steps=2), file, LAYOUT)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    comm = communicator(policy)
    assert residuals.load(comm, file, LAYOUT)
    assert comm.steps == 2


def test_a_save_that_fails_leaves_the_file_of_before(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rank_0.pt"
    residuals.save(communicator(policy, steps=2), file, LAYOUT)

    def fails(state: object, stream: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fails)
        with pytest.raises(OSError, match="no space left"):
            residuals.save(communicator(policy, steps=3), file, LAYOUT)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    comm = communicator(policy)
    assert residuals.load(comm, file, LAYOUT) and comm.steps == 2


def saved_by_a_slow_rank(rank: int, policy: Policy, directory: str) -> list[str]:
    write = torch.save

    def slowly(state: object, stream: object) -> None:
        if rank == 1:
            time.sleep(1)
        write(state, stream)

    comm = Communicator(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", slowly)
        residuals.save(comm, Path(directory, f"rank_{rank}.pt"), LAYOUT)
    return sorted(path.name for path in Path(directory).iterdir())


@pytest.mark.distributed
@pytest.mark.slow
def test_the_files_of_all_ranks_are_there_when_one_returns(policy: Policy, tmp_path: Path) -> None:
    files = on_ranks(2, saved_by_a_slow_rank, policy, str(tmp_path))
    assert files == [["rank_0.pt", "rank_1.pt"]] * 2


def saved_where_one_rank_cannot_write(rank: int, policy: Policy, directory: str) -> str:
    file = Path(directory, f"rank_{rank}.pt")
    if rank == 1:
        file.mkdir()
    with pytest.raises(OSError) as failure:
        residuals.save(Communicator(policy), file, LAYOUT)
    return str(failure.value)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_cannot_write_is_named_on_all_ranks(policy: Policy, tmp_path: Path) -> None:
    for message in on_ranks(2, saved_where_one_rank_cannot_write, policy, str(tmp_path)):
        assert message.startswith("rank 1 cannot write the error-feedback residuals")
        assert "rank_1.pt" in message


def test_another_layout_keeps_the_steps_and_a_missing_file_nothing(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rank_0.pt"
    residuals.save(communicator(policy, steps=2), file, LAYOUT)
    comm = communicator(policy)
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        assert residuals.load(comm, file, {**LAYOUT, "dp": 2}) and comm.steps == 2
        assert "are of the layout" in caplog.text
        assert not residuals.load(comm, tmp_path / "missing.pt", LAYOUT)
    assert "no error-feedback residuals of ranks [0]" in caplog.text


def test_a_file_that_cannot_be_read_is_an_error_of_all_ranks(policy: Policy, tmp_path: Path) -> None:
    file = tmp_path / "rank_0.pt"
    residuals.save(communicator(policy, steps=1), file, LAYOUT)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RuntimeError, match=r"rank 0 cannot read the error-feedback residuals .*rank_0\.pt"):
        residuals.load(communicator(policy), file, LAYOUT)
