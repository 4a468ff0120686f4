"""Pipelines with compressed inputs train what one process trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.processes import start

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

STAGES = ("pipeline",)
TOLERANCE = 1e-5
"""DeepSpeed reduces no gradients in float64; the projection of another step or layer is off by 1e-2."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.compact.deepspeed_ranks import train_plainly

    made = tmp_path_factory.mktemp("deepspeed")
    torch.save(train_plainly(), made / "w.plain")
    start(2, ["-m", "tests.compact.deepspeed_ranks", str(made / "w"), *STAGES])
    return made


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_what_one_process_trains(stage: str, directory: Path) -> None:
    expected = torch.load(directory / "w.plain")
    ranks = [torch.load(directory / f"w.{stage}.{rank}") for rank in range(2)]
    if stage == "pipeline":
        ranks = [ranks[0] | ranks[1]]
    for found in ranks:
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert float((found[name] - weight).abs().max()) < TOLERANCE, name
