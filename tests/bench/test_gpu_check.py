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
from benchmarks.gpu.__main__ import WAYS, largest_microbatch, markdown, row_of
from benchmarks.gpu.attempts import RESERVE, AttemptFailed, Attempts, TimeIsOver
from benchmarks.gpu.measure import CUBLAS, Geometry, Measured, be_deterministic
from benchmarks.gpu.sources import digest

ROOT = Path(__file__).parents[2]
SMALL = Geometry("gpt", 64, 2, 32, 2, vocabulary=128)
PYTHON = """#!/bin/bash
case "$*" in *gpu/sources.py) echo "${SOURCES:-this}"; exit;; esac
echo "$*" >>"$CALLS"
case "$*" in
  *tests/gpu/test_training*) sleep ${TRAINING:-0};;
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


@pytest.mark.slow
def test_steps_that_fail_or_are_cut_off_stop_no_other_and_a_second_call_goes_on(tmp_path: Path) -> None:
    """1. tests fail, and those of training do not end; 2. the next call has no time; 3. others do the rest of the benchmark;
    4. what failed is well, but only a part of it has run again; 5. all of it.
    """
    status, output, calls = check(tmp_path, TESTS="1", TRAINING="30", LIMIT="500", MOST="3")
    assert status == 75 and "SOMETHING FAILED" in output and "left for the next call: bench\n" in output
    assert any("benchmarks.gpu" in call for call in calls)
    first = (tmp_path / "out" / "status.txt").read_text()
    for step, expected in (("doctor", 0), ("streams", 1), ("training", 124), ("kernels", 1), ("bench", 75)):
        assert f"{step}: status {expected}" in first
    status, output, calls = check(tmp_path, LIMIT="0")
    assert status == 75 and "left for the next call: bench\n" in output and not calls
    status, output, calls = check(tmp_path)
    assert status == 1 and "left for" not in output
    assert "SOMETHING FAILED (streams training kernels)" in output, "also what an earlier call ran"
    assert len(calls) == 1, "the benchmark: a step that has ended runs again only where it is named"
    status, output, calls = check(tmp_path, "streams", "kernels")
    assert status == 1 and len(calls) == 2 and "SOMETHING FAILED (training)" in output
    status, output, calls = check(tmp_path, "training", "bench")
    assert status == 0 and len(calls) == 2 and "all well" in output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt", "status.txt"}


def test_what_has_not_run_is_not_called_well(tmp_path: Path) -> None:
    status, output, _ = check(tmp_path, "doctor")
    assert status == 0 and "all well" not in output
    assert "not run: install streams training kernels bench\n" in output
    status, output, calls = check(tmp_path, LIMIT="0")
    assert status == 75 and "all well" not in output and not calls
    status, output, calls = check(tmp_path, "doctor", LIMIT="0")  # named, and then without time for it
    assert status == 75 and "left for the next call: doctor\n" in output and not calls
    assert not (tmp_path / "state" / "doctor.status").exists()


def test_what_is_compared_to_the_bit_is_computed_by_deterministic_algorithms_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `warn_only`, or without the setting of cuBLAS, fused attention and matrix products of a GPU add in any order."""
    monkeypatch.setenv(CUBLAS, "")  # and nothing is left of it
    monkeypatch.delenv(CUBLAS)
    before = torch.get_deterministic_debug_mode()
    try:
        be_deterministic()
        assert torch.get_deterministic_debug_mode() == 2, "2: an error"
        assert os.environ[CUBLAS] == ":4096:8"
    finally:
        torch.set_deterministic_debug_mode(before)
    for file in (ROOT / "benchmarks/gpu/__main__.py", ROOT / "tests/gpu/test_training.py"):
        assert "be_deterministic()" in file.read_text() and "warn_only" not in file.read_text()


@pytest.mark.slow
def test_other_sources_and_a_dry_run_leave_nothing_that_counts(tmp_path: Path) -> None:
    """1. and 2. a dry run; 3. the real one with the same folder; 4. again; 5. with other sources."""
    (tmp_path / "calls.rows").touch()  # the benchmark ends in one call
    status, output, dry = check(tmp_path, "--dry-run")
    assert status == 0 and "all well" in output
    _, _, calls = check(tmp_path, "--dry-run")
    assert not calls
    status, output, calls = check(tmp_path)
    assert status == 0 and len(calls) >= len(dry) > 5 and not any("--device cpu" in call for call in calls)
    _, _, again = check(tmp_path)
    assert not again
    status, output, again = check(tmp_path, SOURCES="other", TESTS="1")
    assert status == 1 and again == calls
    text = (ROOT / "scripts" / "gpu_check.sh").read_text()
    assert "state=${STATE:-build/gpu_check${DRY_RUN:+-dry}}" in text, (
        "by default each has a folder of its own"
    )


def test_the_digest_of_sources_changes_with_their_content_and_names(tmp_path: Path) -> None:
    folder = tmp_path / "ssdtrain"
    folder.mkdir()
    seen = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("b.c", "2"), ("a.pyc", "")):
        (folder / name).write_text(content)
        seen.add(digest(("ssdtrain",), tmp_path))
    assert len(seen) == 3


def measured(loss: float) -> Measured:
    return Measured("keep", 1.0, None, [loss])


HERE = ("this GPU", "these sources")


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
        attempts = Attempts(file, 1000, HERE)
        found = [attempts.measure(SMALL, way, steps=3) for way in ("keep", "host")]
        assert found == [measured(1.0), None]
        with pytest.raises(AttemptFailed, match="no such way"):
            attempts.measure(SMALL, "ssd", steps=3)
        (error,) = attempts.errors
        assert "no such way" in error and "ssd" in error
    assert begun == ["keep", "host", "ssd"]
    for elsewhere in (("other GPU", HERE[1]), (HERE[0], "other sources")):
        attempts = Attempts(file, 1000, elsewhere)
        assert not attempts.errors and attempts.measure(SMALL, "keep", steps=3) == measured(1.0)
    assert begun[3:] == ["keep", "keep"]


def test_what_failed_is_not_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(geometry: Geometry, way: str, **options: Any) -> Measured:
        if way == "ssd" and geometry.microbatch == 2:
            raise ValueError("the drive is full")
        if way != "keep" and geometry.microbatch > 2:
            raise torch.OutOfMemoryError
        return measured(1.0)

    monkeypatch.setattr(module, "measure", measure)
    attempts = Attempts(None, 1000, HERE)
    row = row_of(attempts, SMALL)
    fits = {way: found["fits"] for way, found in row["ways"].items()}
    assert fits == {way: None if way == "ssd" else True for way in WAYS}
    assert "the drive is full" in row["ways"]["ssd"]["error"]
    found = {way: largest_microbatch(attempts, SMALL, way, 8) for way in ("keep", "host", "ssd")}
    assert [found[way].get("microbatch") for way in found] == [8, 2, None]
    result = dict.fromkeys(("date", "hardware", "torch", "sources", "dry_run", "left_out"), "")
    table = markdown(
        {**result, "rows": [row], "largest": [{"geometry": "gpt", "ways": found}], "errors": attempts.errors}
    )
    assert "| gpt | keep | at least 8 | 256 |" in table, "none was too large"
    assert "| gpt | host | 2 | 64 |" in table and "| gpt | ssd | failed | - |" in table
    assert f"| {SMALL.name} | ssd | failed | - | - | - | - |" in table


def test_what_hung_or_broke_the_device_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"key": [SMALL.name, "keep", 3, *HERE]}) + '\n{"key": [')

    def measure(geometry: Geometry, way: str, **options: Any) -> Measured:
        assert way == "ssd"
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "measure", measure)
    attempts = Attempts(file, 1000, HERE)
    with pytest.raises(AttemptFailed, match="did not end"):
        attempts.measure(SMALL, "keep", steps=3)
    with pytest.raises(TimeIsOver):  # nothing of this process can be trusted any more
        attempts.measure(SMALL, "ssd", steps=3)
    attempts = Attempts(file, RESERVE - 1, HERE)
    with pytest.raises(AttemptFailed, match="illegal memory access"):
        attempts.measure(SMALL, "ssd", steps=3)
    assert len(attempts.errors) == 2
    with pytest.raises(TimeIsOver):
        attempts.measure(SMALL, "host", steps=3)
