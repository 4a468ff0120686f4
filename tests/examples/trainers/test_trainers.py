"""Each program of examples/trainers trains as it is pasted: bytes go to the drive, and the end says what it brought."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.two_nodes.ports import free_port
from tests.support.processes import ROOT, ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IN_PROCESS = ("trainer", "peft_lora", "sft", "dpo", "grpo", "accelerate_loop", "lightning_fit")
PROGRAMS = sorted(path.stem for path in (ROOT / "examples" / "trainers").glob("*.py"))

FIRST = re.compile(r"\[ssdtrain\] summary of \d+ steps: saved .*, waited [\d.]+% of the step")
"""Where the drive is busy the default amount may end up with nothing, which is said."""
SECOND = re.compile(r"((limited by|why not more): \S.*|the tiers kept up with the step)")


def check(told: str) -> None:
    """What was printed has the two lines of the end, one below the other, and bytes that were written."""
    lines = told.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "summary of" in line)
    assert FIRST.fullmatch(lines[at].strip()), told
    assert SECOND.fullmatch(lines[at + 1].strip()), told
    assert re.search(r"to SSD, a step +[1-9]", told), told
    print("\n".join(lines[at : at + 2]))  # docs/huggingface.md has them: pytest -rP shows them


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("program", IN_PROCESS)
def test_a_trainer_of_hugging_face_or_lightning(program: str, caplog: pytest.LogCaptureFixture) -> None:
    """In this process, which imports the trainers' packages once."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    runpy.run_module(f"examples.trainers.{program}", run_name="__main__")
    check("\n".join(caplog.messages))


# DeepSpeed compiles an extension for a CPU at its first start, for a minute or more.
START = """
import runpy, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_module("ssdtrain_ds", run_name="__main__", alter_sys=True)
"""
SMALL = "--num-layers 4 --seq-length 128 --micro-batch-size 4 --global-batch-size 8 --train-iters 6 --log-interval 3"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "command",
    [
        "-m deepspeed.launcher.runner --num_gpus 1 --master_port PORT start.py -m examples.trainers.deepspeed_loop",
        "-m torch.distributed.run --standalone start.py -m examples.trainers.deepspeed_loop",
        "-m torch.distributed.run --standalone -m tests.megatron.cpu -m examples.megatron_gpt --distributed-backend gloo "
        f"--data-cache-path data --ssdtrain-offload-directories ./spill {SMALL}",
    ],
    ids=["deepspeed", "torchrun with DeepSpeed", "torchrun with Megatron"],
)
def test_a_framework_by_its_launcher(command: str, tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(START)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = command.replace("PORT", str(free_port())).split()
    done = ran([sys.executable, "-W", "ignore", *words], env=environment, timeout=560)
    check(done.stdout + done.stderr)


def test_every_program_is_run() -> None:
    assert set(PROGRAMS) == {"__init__", "tiny", "deepspeed_loop", *IN_PROCESS}
