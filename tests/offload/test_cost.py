"""How much Python a saved tensor costs the thread that trains: bytecodes and calls of functions, whatever the machine does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pack_hook import COUNTED, python_costs
from ssdtrain.config.units import MiB
from tests.offload.conftest import MakeRuntime

# Of CPython 3.11, which runs the most bytecodes of the versions that are supported.
OPCODES = {"refused": 43, "small": 264, "kept": 525, "offloaded": 1430, "joined": 470, "used": 1980}
CALLS = {"refused": 3, "small": 7, "kept": 8, "offloaded": 33, "joined": 10, "used": 59}


def test_a_saved_tensor_costs_no_more_python_than_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSDTRAIN_POISON", "0")  # it overwrites each slot that is free again
    costs = python_costs(MiB, tmp_path)
    opcodes = {kind: cost.opcodes.total() / COUNTED for kind, cost in costs.items()}
    calls = {kind: cost.calls.total() / COUNTED for kind, cost in costs.items()}
    assert {kind: count for kind, count in opcodes.items() if count > OPCODES[kind]} == {}
    assert {kind: count for kind, count in calls.items() if count > CALLS[kind]} == {}


def test_a_profile_has_the_time_in_which_a_host_that_computes_began_stores(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each store begins in the hook of the next tensor, and takes a second of this clock."""
    runtime = make_runtime()
    engine = runtime.engine
    options = replace(engine.options, clock=itertools.count().__next__)
    monkeypatch.setattr(engine._starter, "_options", options)
    engine.recorder.request("test", True)
    with runtime.forward():
        y = torch.randn(1024).requires_grad_() * 2
        for _ in range(4):
            y = y.sin()
    with runtime.backward():
        y.sum().backward()
    (tape,) = engine.recorder.take("test").tapes()
    assert [region.storing for region in tape.regions] == [0.0, 1.0, 1.0, 1.0]
    engine.recorder.request("test", False)
