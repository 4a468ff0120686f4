"""Every operator that PyTorch has tests for: see `operators`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from tests.support.processes import ran


def sweep(*arguments: str, timeout: float) -> dict[str, Any]:
    done = ran(
        [sys.executable, "-m", "tests.offload.operators", *arguments],
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_sample_of_the_operators_shows_the_same_bits() -> None:
    names = [
        "sin",
        "nn.functional.rrelu",
        "cumprod",
        "nn.functional.dropout",
        "linalg.svd",
        "nn.functional.gelu",
    ]
    found = sweep("--samples", "2", "--variants", "c", "staged", "--", *names, timeout=280)
    assert found["differ"] == []
    assert found["operators"] >= len(names) and found["samples"] > 2 * len(names)
    assert found["c loaded_bytes"] and found["staged loaded_bytes"]
    assert not found["c live_regions"] and not found["staged live_regions"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_operator_shows_the_same_bits_under_every_variant() -> None:
    found = sweep(timeout=3500)
    assert found["differ"] == []
    assert found["operators"] > 500 and found["samples"] > 2000
