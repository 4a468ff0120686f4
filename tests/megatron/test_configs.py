"""The launch scripts: what they would run, with the programs that start processes replaced by one that prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ssdtrain.config import load_config
from tests.support.processes import ran

CONFIGS = Path(__file__).parents[2] / "configs" / "megatron"


@pytest.fixture
def run(tmp_path: Path) -> object:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("torchrun", "srun", "numactl", "python"):
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
    (programs / "scontrol").write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")
    for program in programs.iterdir():
        program.chmod(0o755)

    def start(*command: str, **environment: str) -> list[str]:
        done = ran(
            ["bash", *command],
            env={"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path), **environment},
            cwd=tmp_path,
        )
        return done.stdout.splitlines()

    return start


NEEDED = {"MEGATRON_LM_DIR": "/lm", "DATA": "/data/text", "TOKENIZER": "--tokenizer-type NullTokenizer"}


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_torchrun_gets_the_nodes_and_the_launcher_the_script_with_its_flags(run: object) -> None:
    command = str(CONFIGS / "pretrain_gpt_torchrun.sh")
    found = run(command, "--train-iters", "5", **NEEDED, NNODES="8", NODE_RANK="3", MASTER_ADDR="node0")  # type: ignore[operator]
    assert found[0] == "torchrun"
    assert (value(found, "--nnodes"), value(found, "--node-rank"), value(found, "--master-addr")) == (
        "8",
        "3",
        "node0",
    )
    module = found.index("ssdtrain_megatron.run")
    assert found[module + 1] == "/lm/pretrain_gpt.py"
    assert value(found, "--tensor-model-parallel-size") == "8"
    assert value(found, "--tokenizer-type") == "NullTokenizer"
    assert value(found, "--ssdtrain-config") == str(CONFIGS / "ssdtrain.yaml")
    assert found[-2:] == ["--train-iters", "5"]
    assert not any(argument.startswith("#") or argument == "" for argument in found)


def test_slurm_starts_a_task_per_gpu_and_says_where_the_first_node_is(run: object) -> None:
    slurm = {"SLURM_SUBMIT_DIR": str(CONFIGS), "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "node[7-8]"}
    tasks = {"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"}
    found = run(str(CONFIGS / "pretrain_gpt.sbatch"), **NEEDED, **slurm, **tasks)  # type: ignore[operator]
    assert found[0] == "srun"
    assert "LOCAL_RANK=$SLURM_LOCALID" in found[4]
    assert value(found, "ssdtrain_megatron.run") == "/lm/pretrain_gpt.py"


def test_what_is_missing_is_named(run: object) -> None:
    with pytest.raises(AssertionError, match="MEGATRON_LM_DIR: a checkout of Megatron-LM"):
        run(str(CONFIGS / "pretrain_gpt_torchrun.sh"), DATA="/data/text")  # type: ignore[operator]


def test_a_rank_is_bound_to_the_node_it_is_told(run: object) -> None:
    nodes = {"SSDTRAIN_NUMA_NODES": "0 0 1 1", "LOCAL_RANK": "2"}
    found = run(str(CONFIGS / "bind_rank.sh"), "python", "train.py", **nodes)  # type: ignore[operator]
    assert found == ["numactl", "--cpunodebind=1", "--membind=1", "python", "train.py"]
    found = run(
        str(CONFIGS / "bind_rank.sh"), "python", "train.py", SSDTRAIN_NUMA_NODES="-1", SLURM_LOCALID="0"
    )  # type: ignore[operator]
    assert found == ["python", "train.py"]


def test_the_config_is_one() -> None:
    config = load_config(CONFIGS / "ssdtrain.yaml")
    assert config.active and config.offload is not None
    first, second = (config.offload.expand(rank=8 + local, local_rank=local) for local in (0, 1))
    assert first != second
