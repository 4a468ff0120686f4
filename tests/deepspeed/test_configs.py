"""The configs that ship are ones that DeepSpeed and the schema accept, and the scripts are ones that a shell does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from ssdtrain.config import load_config
from ssdtrain_ds.launch import parse
from tests.support.processes import ROOT

DIRECTORY = ROOT / "configs" / "deepspeed"
CONFIGS = sorted(DIRECTORY.glob("*.json"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_deepspeed_and_the_schema_accept_it(file: Path, process_group: None) -> None:
    written: dict[str, Any] = json.loads(file.read_text())
    assert DeepSpeedConfig(str(file)).zero_optimization_stage == written["zero_optimization"]["stage"]
    config = load_config(written["ssdtrain"])
    assert config.active and config.offload is not None
    assert all("/nvme" in directory for directory in config.offload.directories)
    if "3d" in file.stem:
        assert written["zero_optimization"]["stage"] < 2  # with a pipeline DeepSpeed asserts the others out


def test_every_size_is_there_and_in_the_documentation() -> None:
    names = {file.name for file in DIRECTORY.iterdir()}
    for size in ("1.3b", "7b", "20b", "70b"):
        assert any(f"gpt-{size}-" in name for name in names)
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    for name in names - {"zero2_offload.json"}:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("name", ["launch-pdsh.sh", "launch-slurm.sbatch"])
def test_the_launch_scripts_are_shell_and_run_the_module(name: str) -> None:
    text = (DIRECTORY / name).read_text()
    shell = text.splitlines()[0].removeprefix("#!").split("/")[-1]
    subprocess.run([shell, "-n", str(DIRECTORY / name)], check=True)
    assert 'ssdtrain_ds "$@"' in text
    example = next(line for line in text.splitlines() if "train.py" in line)
    command = parse(["--local_rank=0", *example.split(name)[1].split()])
    assert command.name == "train.py"
    assert (ROOT / command.arguments[-1]).exists()


def test_the_hostfile_is_one_that_deepspeed_reads() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    pool = fetch_hostfile(str(DIRECTORY / "hostfile"))
    assert pool and set(pool.values()) == {8}


def test_the_block_of_the_documentation_is_accepted() -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    block = json.loads(page.split("```json")[1].split("```")[0])
    assert load_config(block["ssdtrain"]).active
