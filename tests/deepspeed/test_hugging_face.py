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
def test_the_trainer_gets_the_same_losses_and_parameters(name: str, found: dict[str, Any]) -> None:
    plain, offloaded = found[name]["plain"], found[name]["offloaded"]
    assert len(plain["losses"]) == 2
    assert offloaded["losses"] == plain["losses"]
    assert offloaded["parameters"] == plain["parameters"]


@pytest.mark.parametrize("name", NAMES)
def test_the_journal_has_each_loss_at_its_own_step(name: str, found: dict[str, Any]) -> None:
    assert found[name]["offloaded"]["journal"] == found[name]["offloaded"]["losses"]


@pytest.mark.parametrize("name", NAMES)
def test_activations_of_the_model_left_and_nothing_is_there_any_more(
    name: str, found: dict[str, Any]
) -> None:
    assert "saved_bytes" not in found[name]["plain"]
    assert found[name]["offloaded"]["saved_bytes"] > 0
    assert found[name]["offloaded"]["live_slots"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_trainers_own_log_has_the_metrics_of_offloading(name: str, found: dict[str, Any]) -> None:
    assert found[name]["plain"]["logged"] == [[], []]
    for keys in found[name]["offloaded"]["logged"]:
        assert {"ssdtrain/saved_bytes", "ssdtrain/unoffloaded_peak_bytes", "ssdtrain/step_seconds"} <= set(
            keys
        )
    assert found[name]["plain"]["log_is_plain"] and found[name]["offloaded"]["log_is_plain"]
