"""The benchmarks of offloading train what users train: 16 bits, a large vocabulary, default settings, each stage of ZeRO."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ran

ROOT = Path(__file__).parent.parent
SMALL = "--json --layers 2 --hidden 96 --sequence 256 --batch 8 --pairs 2"


def figures(module: str, options: str) -> dict[str, Any]:
    done = ran(
        [sys.executable, "-m", f"benchmarks.{module}", *SMALL.split(), *options.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        cwd=ROOT,
        timeout=500,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "t5"])
def test_gradients_are_equal_in_16_bits_with_a_large_vocabulary_and_default_settings(model: str) -> None:
    options = f"--model {model} --dtype bfloat16 --vocabulary 2048 --in-flight default --amount all"
    found = figures("activation", options)
    assert (found["dtype"], found["vocabulary"]) == ("bfloat16", 2048)
    assert found["loss_equal"] and found["grads_equal"] and found["ssd_bytes_per_step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["--stage 0", "--stage 1 --dtype bfloat16", "--stage 2 --amount auto", "--stage 3 --dtype bfloat16"],
)
def test_gradients_are_equal_under_every_stage_of_zero(options: str) -> None:
    found = figures("deepspeed_offloads", f"--vocabulary 2048 {options}")
    assert found["losses_equal"] and found["grads_equal"]
    assert found["moved_bytes_per_step"] > 0 or found["amount"] == "auto"
