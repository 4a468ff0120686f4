"""Hugging Face's Trainer over accelerate: models built from a config, with and without the block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.conftest import ACCELERATOR
from tests.support.processes import forked

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("gpt2", "bert", "t5", "llama", "llama-gradient-checkpointing")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("transformers", reason="Hugging Face's packages are among requirements-dev.txt")
    directory: Path = tmp_path_factory.mktemp("hugging-face")
    output = forked(1, "tests.deepspeed.hugging_face", str(directory), timeout=550, **ACCELERATOR)
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    results: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    assert set(results) == set(NAMES)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_gets_the_same_losses_and_parameters_and_logs_what_left(
    name: str, found: dict[str, Any]
) -> None:
    plain, offloaded = found[name]["plain"], found[name]["offloaded"]
    assert len(plain["losses"]) == 2
    assert offloaded["losses"] == plain["losses"] and offloaded["parameters"] == plain["parameters"]
    assert offloaded["journal"] == offloaded["losses"], "each loss at its own step"
    assert "saved_bytes" not in plain
    assert offloaded["saved_bytes"] > 0 and offloaded["live_slots"] == 0
    assert plain["logged"] == [[], []] and plain["log_is_plain"] and offloaded["log_is_plain"]
    for keys in offloaded["logged"]:
        assert {"ssdtrain/saved_bytes", "ssdtrain/unoffloaded_peak_bytes", "ssdtrain/step_seconds"} <= set(
            keys
        )
