"""The check of a GPU goes on where it was cut off: each step and each row by itself, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import attempts as module
from benchmarks.gpu.attempts import RESERVE, Attempts, TimeIsOver
from benchmarks.gpu.measure import Geometry, Measured

ROOT = Path(__file__).parents[2]
SMALL = Geometry("gpt", 64, 2, 32, 2, vocabulary=128)
PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
  *tests/gpu/test_training*) sleep 30;;
  "-m pytest"*) exit ${TESTS:-0};;
  *benchmarks.gpu*) [ -e "$CALLS.rows" ] && exit 0; touch "$CALLS.rows"; exit 75;;
esac
"""


def check(directory: Path, *steps: str, **environment: str) -> tuple[int, str, list[str]]:
    """Status, output, and what was run, of one call of the script with a Python that does nothing."""
    python = directory / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls = directory / "calls"
    calls.unlink(missing_ok=True)
    given = {"PYTHON": str(python), "CALLS": str(calls), "STATE": str(directory / "state")}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *steps],
        env={**os.environ, **given, "OUT": str(directory / "out"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (
        done.returncode,
        done.stdout + done.stderr,
        calls.read_text().splitlines() if calls.exists() else [],
    )


def test_steps_that_fail_or_are_cut_off_stop_no_other_and_a_second_call_goes_on(tmp_path: Path) -> None:
    """1. tests fail, and those of training do not end; 2. the next call has no time; 3. others do the rest of the benchmark."""
    status, output, calls = check(tmp_path, TESTS="1", LIMIT="500", MOST="3")
    assert status == 1 and "SOMETHING FAILED" in output and "left for the next call: bench\n" in output
    assert any("benchmarks.gpu" in call for call in calls)
    first = (tmp_path / "out" / "status.txt").read_text()
    for step, expected in (("doctor", 0), ("streams", 1), ("training", 124), ("kernels", 1), ("bench", 75)):
        assert f"{step}: status {expected}" in first
    status, output, calls = check(tmp_path, LIMIT="0")
    assert status == 0 and "left for the next call: bench\n" in output and not calls
    status, output, calls = check(tmp_path)
    assert status == 0 and "left for" not in output
    assert len(calls) == 1, "the benchmark: a step that has ended runs again only where it is named"
    status, output, calls = check(tmp_path, "doctor", "bench")
    assert status == 0 and len(calls) == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt", "status.txt"}


def measured(loss: float) -> Measured:
    return Measured("keep", 1.0, None, [loss])


def test_a_row_is_measured_once_and_what_fails_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    ways = {"keep": 1.0, "host": torch.OutOfMemoryError(), "ssd": ValueError("no such way")}
    begun: list[str] = []

    def measure(geometry: Geometry, way: str, **options: Any) -> Measured:
        begun.append(way)
        result = ways[way]
        if isinstance(result, Exception):
            raise result
        return measured(float(result))

    monkeypatch.setattr(module, "measure", measure)
    for _ in range(2):
        attempts = Attempts(file, 1000)
        found = [attempts.measure(SMALL, way, steps=3) for way in ways]
        assert found == [measured(1.0), None, None]
        (error,) = attempts.errors
        assert "no such way" in error and "ssd" in error
    assert begun == list(ways)


def test_what_hung_or_broke_the_device_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"key": [SMALL.name, "keep", 3]}) + '\n{"key": [')

    def measure(geometry: Geometry, way: str, **options: Any) -> Measured:
        assert way == "ssd"
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "measure", measure)
    attempts = Attempts(file, 1000)
    assert attempts.measure(SMALL, "keep", steps=3) is None
    with pytest.raises(TimeIsOver):  # nothing of this process can be trusted any more
        attempts.measure(SMALL, "ssd", steps=3)
    attempts = Attempts(file, RESERVE - 1)
    assert attempts.measure(SMALL, "ssd", steps=3) is None and len(attempts.errors) == 2
    with pytest.raises(TimeIsOver):
        attempts.measure(SMALL, "host", steps=3)
