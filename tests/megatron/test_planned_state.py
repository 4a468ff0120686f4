"""Megatron-LM's flags for a plan: what is printed, and what a run without them is told."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.config import ConfigError
from ssdtrain.planner.planned_state import PlannedState
from ssdtrain.tools.cli.main import main
from ssdtrain_megatron.planned_state import check_flags, state_flags

STATE = PlannedState(
    place="host",
    zero=1,
    ranks=2,
    blocks=8,
    persistent=2,
    buffers=2,
    block_parameters=1000,
    outer_parameters=500,
    largest_parameter=100,
    cpu_optimizer=False,
)


def flags_of(capsys: pytest.CaptureFixture[str], words: str) -> list[str]:
    model = "--model gpt --hidden 1024 --layers 8 --seq 1024 --gpu h100 --gpus-per-node 8 --no-alternatives"
    assert main(["plan", *f"{model} {words} --print-flags".split()]) == 0
    return shlex.split(capsys.readouterr().out)


def test_flags_say_layout_batch_and_how_many_layers_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    given = flags_of(capsys, "--tp 2 --pp 2 --dp 2 --zero 1 --batch 128 --microbatch 32 --reserve 70GiB")
    parser = argparse.ArgumentParser()
    for flag in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "recompute-num-layers"):
        parser.add_argument(f"--{flag}", type=int)
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    args, _ = parser.parse_known_args(given)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert args.use_distributed_optimizer
    assert args.recompute_granularity == "full"
    assert 1 <= args.recompute_num_layers <= 4


def test_state_away_is_the_share_of_the_optimizer_that_is_offloaded() -> None:
    assert state_flags(STATE) == {
        "--use-distributed-optimizer": True,
        "--use-precision-aware-optimizer": True,
        "--optimizer-cpu-offload": True,
        "--optimizer-offload-fraction": 0.75,
    }
    assert state_flags(replace(STATE, cpu_optimizer=True))["--optimizer-offload-fraction"] == 1.0
    assert "--optimizer-cpu-offload" in state_flags(replace(STATE, persistent=8, cpu_optimizer=True))
    assert state_flags(replace(STATE, place="device", zero=0)) == {}


def test_a_run_with_other_flags_is_an_error_with_those_of_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"state": STATE.to_dict()}))
    args = {"use_distributed_optimizer": True, "optimizer_cpu_offload": True}
    with pytest.raises(
        ConfigError,
        match=r"plan\.file .*flags --use-precision-aware-optimizer --optimizer-offload-fraction 0\.75, as",
    ):
        check_flags(str(file), {**args, "optimizer_offload_fraction": 1.0})
    check_flags(
        str(file), {**args, "use_precision_aware_optimizer": True, "optimizer_offload_fraction": 0.75}
    )
