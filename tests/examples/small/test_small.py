"""The programs of one page train alike with and without SSDTrain, and move something."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import ran

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def run(tmp_path: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = ran(
        [sys.executable, "-W", "ignore", *command, "--directory", str(tmp_path / "spill")],
        cwd=tmp_path,
        env=environment,
        timeout=240,
    )
    assert "losses are equal to the bit" in done.stdout
    assert re.search(r"to SSD, a step +[1-9]", done.stderr), done.stderr
    return done.stdout


def test_plain_pytorch_with_a_plot(tmp_path: Path) -> None:
    run(tmp_path, "-m", "examples.small.pytorch_loop", "--plot", "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.distributed
@pytest.mark.parametrize("program", ["fsdp2", "deepspeed_zero3", "deepspeed_pipeline"])
def test_two_processes(tmp_path: Path, program: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run(tmp_path, *launcher, "-m", f"examples.small.{program}")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("program", ["hugging_face", "lora"])
def test_the_trainer(tmp_path: Path, program: str) -> None:
    run(tmp_path, "-m", f"examples.small.{program}")
