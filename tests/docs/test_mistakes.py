"""The mistakes of docs/troubleshooting.md are made as they are written there, and what is said is what the page has."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.tools.cli import main
from ssdtrain_ds.block import check_place
from tests.docs.messages import GAP, ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = re.findall(r"^\| `(.+?)`(.*?) \| `(.+)` \|$", PAGE.split("\n## Mistakes")[1], re.M)


class Model(nn.Sequential):
    """What a training loop trains."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    there = Path("/dev/shm/spill").exists()
    yield
    if not there and Path("/dev/shm/spill").exists():
        Path("/dev/shm/spill").rmdir()


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.ones(512, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make(written: str) -> None:
    """Make the mistake: a config in a run, a call before one, or a command."""
    model = Model()
    if written.startswith("ssdtrain "):
        status = main(shlex.split(written)[1:])
        assert status != 0
    elif written.startswith("ssdtrain."):
        eval(written, {"ssdtrain": ssdtrain, "Model": Model})
    else:
        config: dict[str, Any] = json.loads(written)
        if "zero_optimization" in config:
            check_place(config)
        with ssdtrain.attach(model, config):
            train(model)


@pytest.mark.parametrize(("written", "also", "said"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_mistake_is_told_with_what_to_do(
    written: str,
    also: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An earlier test of this process may have left a group.
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    expected = ".*".join(map(re.escape, said.split(GAP)))
    error = ""
    try:
        make(written)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever it is, its text is compared
        error = str(raised)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = "\n".join([error, *warned, capsys.readouterr().err])
    assert re.search(expected, told), told
    if not error and not written.startswith("ssdtrain "):  # a warning names its page
        pages = re.findall(r"docs/[\w-]+\.md", told)
        assert pages and all((ROOT / page).exists() for page in pages), told


def test_there_are_twenty_and_none_is_there_twice() -> None:
    assert len({written for written, _, _ in ROWS}) == len(ROWS) >= 20
    assert len(ROWS) == PAGE.split("\n## Mistakes")[1].count("\n| `")
