"""The check of a GPU goes on where it was cut off: each step and each row by itself, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import attempts as module
from benchmarks.gpu.__main__ import WAYS, largest_microbatch, markdown, row_of
from benchmarks.gpu.attempts import RESERVE, AttemptFailed, Attempts, DriveTooSlow, TimeIsOver
from benchmarks.gpu.measure import CUBLAS, SETTLING, Geometry, Measured, be_deterministic, measure
from benchmarks.gpu.sources import digest
from tests.support.processes import ran

ROOT = Path(__file__).parents[3]
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
    for step, expected in (
        ("doctor", 0),
        ("streams", 1),
        ("training", 124),
        ("kernels", 1),
        ("frameworks", 1),
        ("bench", 75),
    ):
        assert f"{step}: status {expected}" in first
    status, output, calls = check(tmp_path, LIMIT="0")
    assert status == 75 and "left for the next call: bench\n" in output and not calls
    status, output, calls = check(tmp_path)
    assert status == 1 and "left for" not in output
    assert "SOMETHING FAILED (streams training kernels frameworks)" in output, "also what an earlier call ran"
    assert len(calls) == 1, "the benchmark: a step that has ended runs again only where it is named"
    status, output, calls = check(tmp_path, "streams", "kernels", "frameworks")
    assert (
        status == 1
        and sum("pytest" in call for call in calls) == 3
        and "SOMETHING FAILED (training)" in output
    )
    status, output, calls = check(tmp_path, "training", "bench")
    assert status == 0 and len(calls) == 2 and "all well" in output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt", "status.txt"}


def test_what_has_not_run_is_not_called_well(tmp_path: Path) -> None:
    status, output, _ = check(tmp_path, "doctor")
    assert status == 0 and "all well" not in output
    assert "not run: install streams training kernels frameworks model_state bench\n" in output
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
    for file in (ROOT / "benchmarks/gpu/__main__.py", ROOT / "tests/gpu/conftest.py"):
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
    return Measured("keep", 1.0, None, None, [loss])


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
    result = dict.fromkeys(("date", "hardware", "torch", "sources", "dry_run", "left_out", "too_slow"), "")
    table = markdown(
        {**result, "rows": [row], "largest": [{"geometry": "gpt", "ways": found}], "errors": attempts.errors}
    )
    assert "| gpt | keep | at least 8 | 256 |" in table, "none was too large"
    assert "| gpt | host | 2 | 64 |" in table and "| gpt | ssd | failed | - |" in table
    assert f"| {SMALL.name} | ssd | failed | - | - | - | - | - | - |" in table


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


def test_a_drive_that_is_too_slow_is_said_and_not_taken_for_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of 100 MB/s takes minutes for a step of the large models: the call would be cut off in it, and the next one would
    say that it never ended."""
    file, begun = tmp_path / "rows.jsonl", []

    def measure(geometry: Geometry, way: str, **options: Any) -> Measured:
        begun.append((geometry.microbatch, way))
        return measured(1.0)

    monkeypatch.setattr(module, "measure", measure)
    large = Geometry("gpt", 8192, 4, 1024, 16)
    slow = Attempts(file, 1000, HERE, drive=(100e6, 100e6))
    row = row_of(slow, large)
    assert [way for _, way in begun] == ["keep", "recompute", "save_on_cpu", "host", "host_auto"]
    assert not slow.errors and len(slow.too_slow) == 2 and "writes 95.4 MiB/s" in slow.too_slow[0]
    with pytest.raises(DriveTooSlow):
        slow.measure(large, "ssd", steps=3)
    assert largest_microbatch(slow, large, "ssd", 8) == {
        "microbatch": 0,
        "tokens_per_second": 0.0,
        "at_least": True,
    }
    result = dict.fromkeys(("date", "hardware", "torch", "sources", "dry_run", "left_out"), "")
    table = markdown({**result, "rows": [row], "largest": [], "errors": [], "too_slow": slow.too_slow})
    assert f"| {large.name} | ssd_auto | drive too slow |" in table and f"- {slow.too_slow[1]}" in table
    fast = Attempts(file, 1000, HERE, drive=(6e9, 6e9))
    assert fast.measure(large, "ssd", steps=3) == measured(1.0), "a better drive is tried"


@pytest.mark.slow
def test_the_default_amount_is_measured_once_it_is_chosen_and_reserved_memory_beside_allocated(
    tmp_path: Path,
) -> None:
    cpu = {"device": torch.device("cpu"), "directory": str(tmp_path), "host_bytes": 64 << 20}
    keep = measure(SMALL, "keep", steps=3, **cpu)
    auto = measure(SMALL, "ssd_auto", steps=3, **cpu)
    assert auto.losses[:3] == keep.losses and len(auto.losses) == len(keep.losses) + SETTLING
    assert (keep.peak_bytes, keep.reserved_bytes) == (None, None), "a CPU does not say"
    row = {"geometry": "gpt", "ways": {"keep": {"fits": True, **dataclasses.asdict(keep)}}}
    row["ways"]["keep"] |= {"peak_bytes": 1 << 30, "reserved_bytes": 3 << 30, "reserved_ratio": 1.0}
    result = dict.fromkeys(("date", "hardware", "torch", "sources", "dry_run", "left_out"), "")
    table = markdown({**result, "rows": [row], "largest": [], "errors": [], "too_slow": []})
    assert "| gpt | keep | 1.00 GiB | - | 3.00 GiB | x1.00 |" in table


# What runs on a machine that has torch and triton for CUDA, and what the script names.
THERE = ("torch", "triton")


def needed_packages() -> list[tuple[str, str]]:
    """(what is imported, package) of the list in the script."""
    text = (ROOT / "scripts" / "gpu_check.sh").read_text().replace("\\\n", "")
    (line,) = [line for line in text.splitlines() if line.startswith("needed=")]
    pairs = [pair.partition(":") for pair in line.partition("=")[2].strip('"').split()]
    return [(module_name, package) for module_name, _, package in pairs]


def with_requirements(packages: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        package = canonicalize_name(waiting.pop())
        if package in found:
            continue
        try:
            lines = requires(package) or []
        except PackageNotFoundError:  # a package of CUDA builds
            continue
        found.add(package)
        named = [Requirement(line) for line in lines]
        waiting += [each.name for each in named if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    """A Python, and its environment, with torch, triton and what the script names: nothing else of this one is there."""
    site = tmp_path_factory.mktemp("site")
    for package in {canonicalize_name(name) for _, name in needed_packages()} | with_requirements(THERE):
        distributed = distribution(package)
        for top in {file.parts[0] for file in distributed.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distributed.locate_file(top))))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))
    }
    return [sys.executable, "-S"], {**environment, "PYTHONPATH": f"{ROOT}:{site}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "-m pytest -q -m gpu --collect-only -p no:cacheprovider tests/gpu tests/test_device.py tests/codecs/test_kernels.py",
        "-m ssdtrain doctor",
        "-m benchmarks.gpu --help",
    ],
    ids=lambda words: words.split()[1],
)
def test_the_packages_that_the_script_names_are_all_that_its_steps_need(
    words: str, bare_python: tuple[list[str], dict[str, str]]
) -> None:
    python, environment = bare_python
    without = [*python, "-c", "import zstandard"]
    assert subprocess.run(without, env=environment, capture_output=True, check=False).returncode == 1, (
        "it is bare"
    )
    ran([*python, *words.split()], env=environment, cwd=ROOT)
