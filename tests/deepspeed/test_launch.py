"""Scripts that nobody edits, under the launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_nodes.ports import free_port
from ssdtrain_ds.launch import Command, UsageError, main, parse, set_single_process
from tests.deepspeed import models
from tests.deepspeed.conftest import environment
from tests.support.processes import ROOT, ran

SCRIPT = ROOT / "tests" / "deepspeed" / "script.py"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["train.py"], Command("train.py", False, [])),
        (["train.py", "--lr", "1"], Command("train.py", False, ["--lr", "1"])),
        (["-m", "pkg.train", "-x"], Command("pkg.train", True, ["-x"])),
        # DeepSpeed's launcher.
        (["--local_rank=3", "train.py", "-x"], Command("train.py", False, ["--local_rank=3", "-x"])),
        (["--local_rank", "3", "train.py", "-x"], Command("train.py", False, ["--local_rank", "3", "-x"])),
        (["--local-rank=3", "-m", "pkg.train"], Command("pkg.train", True, ["--local-rank=3"])),
        # The script's own arguments are not looked at.
        (
            ["train.py", "-m", "x", "--local_rank=1"],
            Command("train.py", False, ["-m", "x", "--local_rank=1"]),
        ),
    ],
)
def test_the_launcher_runs_what_is_named(arguments: list[str], command: Command) -> None:
    assert parse(arguments) == command


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no script"),
        (["--local_rank=0"], "no script"),
        (["-m"], "no script"),
        (["--local_rank"], "no value"),
        (["--verbose", "train.py"], "--verbose is not an option"),
        (["--localhost=1", "train.py"], "--localhost=1 is not an option"),
    ],
)
def test_a_command_without_a_script_is_rejected(arguments: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(arguments)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_printed_and_nothing_is_installed(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([option])
    assert "usage: python -m ssdtrain_ds" in capsys.readouterr().out


def test_one_process_without_a_launcher_gets_its_rank() -> None:
    alone = {"MASTER_ADDR": "10.0.0.1"}
    set_single_process(alone)
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["LOCAL_RANK"]) == ("0", "1", "0")
    assert alone["MASTER_ADDR"] == "10.0.0.1" and int(alone["MASTER_PORT"]) > 0
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"):
        launched = {variable: "1"}
        set_single_process(launched)
        assert launched == {variable: "1"}


@pytest.mark.slow
@pytest.mark.distributed
def test_python_m_needs_no_launcher_and_no_mpi4py(config: Path) -> None:
    base = {key: value for key, value in environment().items() if key not in OF_A_LAUNCHER}
    done = ran(
        [sys.executable, "-m", "ssdtrain_ds", str(SCRIPT), str(config)], cwd=ROOT, env=base, timeout=200
    )
    assert '"saved_bytes"' in done.stdout


OF_A_LAUNCHER = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def results_of(command: list[str], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    done = ran(command, cwd=ROOT, env={**environment(), **(env or {})}, timeout=200)
    lines = done.stdout.splitlines()
    return sorted(
        (json.loads(line.split("RESULT ", 1)[1]) for line in lines if "RESULT " in line),
        key=lambda found: found["rank"],
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "ds.json"
    block = {"offload": {"directories": str(tmp_path / "ssd-{rank}"), "min_bytes": models.MIN_BYTES}}
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": models.BATCH,
                "steps_per_print": 10**9,
                "zero_optimization": {"stage": 1},
                "ssdtrain": block,
            }
        )
    )
    return file


@pytest.mark.long
@pytest.mark.distributed
def test_python_m_and_the_plain_script_give_the_same_losses(config: Path) -> None:
    (plain,) = results_of([sys.executable, str(SCRIPT), str(config)])
    (launched,) = results_of([sys.executable, "-m", "ssdtrain_ds", str(SCRIPT), str(config)])
    assert plain["saved_bytes"] is None
    assert launched["saved_bytes"] > 0
    assert launched["losses"] == plain["losses"]
    assert launched["name"] == "__main__" and launched["argv0"] == str(SCRIPT)


@pytest.mark.long
@pytest.mark.distributed
def test_torchrun_m_runs_a_script_on_every_rank(config: Path) -> None:
    torchrun = [
        sys.executable,
        *["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"],
        str(free_port()),
    ]
    found = results_of([*torchrun, "-m", "ssdtrain_ds", str(SCRIPT), str(config)])
    assert [result["rank"] for result in found] == [0, 1]
    assert all(result["saved_bytes"] > 0 and result["ranks"] == 2 for result in found)


@pytest.mark.long
@pytest.mark.distributed
def test_deepspeeds_launcher_runs_the_module_and_its_local_rank_reaches_the_script(config: Path) -> None:
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    launcher = [deepspeed, "--num_gpus", "1", "--master_port", str(free_port())]
    (found,) = results_of([*launcher, "--module", "ssdtrain_ds", str(SCRIPT), str(config)])
    assert found["local_rank"] == 0
    assert found["saved_bytes"] > 0


@pytest.mark.long
@pytest.mark.distributed
def test_accelerate_launch_runs_the_module(config: Path) -> None:
    pytest.importorskip("accelerate", reason="it is among requirements-dev.txt")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    (found,) = results_of([*launch, "-m", "ssdtrain_ds", str(SCRIPT), str(config)])
    assert found["saved_bytes"] > 0
