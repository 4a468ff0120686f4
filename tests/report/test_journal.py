"""The journal writes what each step added, for every rank, and logs means on rank 0."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from ssdtrain.config import ConfigError, load_config
from ssdtrain.runtime import Runtime

SIZE = 128


def run(tmp_path: Path, report: dict[str, object], steps: int = 6, rank: int = 0) -> None:
    config = {"offload": {"directories": str(tmp_path / "slabs"), "min_bytes": "1KiB"}, "report": report}
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with Runtime(load_config(config), rank=rank) as runtime:
        for _ in range(steps):
            with runtime.step():
                with runtime.forward():
                    loss = x.sin().cos().sum()
                loss.backward()
            del loss


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
        assert all(line["seconds"] > 0 for line in lines)
        moved = [line["offloaded_bytes"] + line["cancelled_bytes"] for line in lines]
        assert all(0 < m <= 2 * 2 * SIZE * SIZE * 4 for m in moved)


def test_rank_0_logs_every_interval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssdtrain"):
        run(tmp_path, {"interval": 3})
        run(tmp_path, {"interval": 3}, rank=1)
        run(tmp_path, {"interval": 0})
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 6"]
    assert "128 KiB saved for backward" in lines[0] and "means over 3 steps" in lines[0]


def test_a_directory_that_cannot_be_made_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ssdtrain\.report\.path"):
        run(tmp_path, {"path": str(tmp_path / "file" / "report")})
