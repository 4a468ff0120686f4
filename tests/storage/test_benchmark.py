"""The I/O benchmark runs and ends with its figures; the statistics that benchmarks share are right."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

from ssdtrain.tools.bench.ratios import interval, paired_ratio
from tests.support.processes import ran

KEYS = {
    "write_ratio_fio", "read_ratio_fio", "busy_write_ratio", "busy_read_ratio", "cpu_s_per_gb", "python_engine_write_ratio",
}  # fmt: skip


def test_the_io_benchmark_ends_with_one_json_object(tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("the benchmark compares with fio, which is not installed here")
    command = [sys.executable, "-m", "benchmarks.io_engine", "--json", "--size", "32", "--repeats", "1"]
    done = ran([*command, "--directory", str(tmp_path)], timeout=280)
    lines = done.stdout.splitlines()
    figures = json.loads(lines[-1])
    assert figures.keys() >= KEYS and all(figures[key] > 0 for key in KEYS)
    assert any(
        line.startswith("GLIBC_TUNABLES") and "--iodepth=8" in line and "--bs=4m" in line for line in lines
    )
    assert list(tmp_path.iterdir()) == []


def test_a_paired_ratio_survives_drift() -> None:
    drift = [1.0, 3.0, 0.5, 2.0, 8.0]
    assert paired_ratio([0.9 * speed for speed in drift], drift) == pytest.approx(0.9)


def test_the_interval_is_that_of_the_sign_test() -> None:
    # For 30 values the 10th smallest and the 10th largest bound a 95% interval (Conover, Practical Nonparametric Statistics).
    assert interval(list(range(1, 31))) == (10, 21)
    assert interval([3, 1, 2]) == (1, 3)
    draw = random.Random(1)
    inside = 0
    for _ in range(400):
        low, high = interval([draw.gauss(5, 1) for _ in range(30)])
        inside += low <= 5 <= high
    assert inside >= 0.93 * 400
