"""megatron-core's own fine-grained offloading and SSDTrain on the same model."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.processes import start

OWN = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
)
def test_beside_upstream_more_bytes_move_and_the_peak_is_lower() -> None:
    output = start(1, ["-W", "ignore", "-m", "tests.megatron.cpu", "-m", "tests.megatron.upstream"])
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    none, theirs, ours = found["none"], found["upstream"], found["ssdtrain, small window"]
    assert ours["steps"] == found["ssdtrain, all"]["steps"] == none["steps"]
    assert found["recompute"]["steps"] == none["steps"]
    assert theirs["steps"] == none["steps"]
    assert ours["moved_bytes_per_step"] > theirs["moved_bytes_per_step"] > 0
    assert ours["peak_bytes"] < theirs["peak_bytes"] < none["peak_bytes"]
    assert found["ssdtrain, all"]["peak_bytes"] < none["peak_bytes"]  # by how much depends on the drive
