"""`report.tensorboard`: a plain loop's metrics, by the names that are declared, and values of the script."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain.telemetry.tensorboard import TensorBoard

FULL = OSError(28, "No space left on device")


class Writer:
    """A stand-in for torch.utils.tensorboard.SummaryWriter."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.values: dict[str, dict[int, float]] = defaultdict(dict)
        self.error: Exception | None = None
        self.closed = self.fails_to_close = False
        Writer.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if self.error is not None:
            raise self.error
        assert step not in self.values[tag]
        self.values[tag][step] = value

    def close(self) -> None:
        self.closed = True
        if self.fails_to_close:
            raise RuntimeError("the last values are lost")


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """The writers that are made; tensorboard need not be installed."""
    package, module = ModuleType("tensorboard"), ModuleType("torch.utils.tensorboard")
    package.__spec__ = importlib.machinery.ModuleSpec("tensorboard", None, origin="here")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    return Writer.made


def train(
    tmp_path: Path, steps: int, *, fails_at: int = 0, error: Exception = FULL, **report: Any
) -> dict[str, float]:
    """The totals at the end."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    offload = {"directories": str(tmp_path / "spill"), "min_bytes": "4KiB", "amount": "all"}
    config = {"offload": offload, "report": {"tensorboard": str(tmp_path / "board"), **report}}
    with ssdtrain.attach(model, config) as runtime:
        for step in range(1, steps + 1):
            if step == fails_at:
                Writer.made[0].error = error
            model(torch.randn(256, 64)).sum().backward()
            runtime.log_values(loss=1.0 / step)
            runtime.step_end()
        found = runtime.statistics()
    return found.values()


def test_declared_metrics_and_values_of_the_script_are_scalars(tmp_path: Path, writers: list[Writer]) -> None:
    totals = train(tmp_path, 4, interval=2)
    (writer,) = writers
    assert writer.directory == str(tmp_path / "board" / "rank-0")
    assert writer.closed
    assert writer.values["loss"] == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3), 4: 0.25}
    saved = writer.values["ssdtrain/saved_bytes"]
    assert list(saved) == [2, 4]  # means per step since the time before
    assert 2 * sum(saved.values()) == totals["saved_bytes"] > 0
    # A gauge is the value of the moment; what was never more than 0 is left out.
    assert writer.values["ssdtrain/unoffloaded_peak_bytes"][4] == totals["unoffloaded_peak_bytes"] > 0
    assert "ssdtrain/failed_stores" not in writer.values


def test_without_an_interval_every_step_counts(tmp_path: Path, writers: list[Writer]) -> None:
    train(tmp_path, 3, interval=0)
    assert list(writers[0].values["ssdtrain/saved_bytes"]) == [1, 2, 3]


@pytest.mark.parametrize("error", [FULL, RuntimeError("of another library: No space left on device")])
def test_a_full_disk_ends_the_scalars_and_not_the_training(
    tmp_path: Path, writers: list[Writer], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        train(tmp_path, 5, fails_at=3, error=error, interval=1)
    warned = [text for record in caplog.records if "report.tensorboard" in (text := record.getMessage())]
    assert len(warned) == 1 and "No space left" in warned[0]
    assert list(writers[0].values["loss"]) == [1, 2]


def test_a_second_writer_of_the_process_has_a_directory_of_its_own(
    tmp_path: Path, writers: list[Writer], caplog: pytest.LogCaptureFixture
) -> None:
    boards = [TensorBoard(tmp_path / "rank-0", 0) for _ in range(3)]
    writers[1].fails_to_close = True
    boards[1].close()
    assert "could not be closed (RuntimeError: the last values are lost)" in caplog.text
    boards.append(TensorBoard(tmp_path / "rank-0", 0))
    assert [Path(writer.directory).name for writer in writers] == [
        "rank-0",
        "rank-0.1",
        "rank-0.2",
        "rank-0.1",
    ]


def test_without_the_package_the_key_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else plain(name)
    )
    with pytest.raises(ConfigError, match=r"ssdtrain\.report\.tensorboard: .* not installed.*pip install"):
        train(tmp_path, 1)
