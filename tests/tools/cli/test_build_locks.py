"""A lock that a killed build of an extension left is found, and one of a build that goes on is left in peace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.utils.cpp_extension as cpp_extension

from ssdtrain.tools.cli import build_locks, doctor
from ssdtrain.tools.cli.finding import GOOD, NOTE, WARNING

pytestmark = pytest.mark.skipif(
    not hasattr(cpp_extension, "FileBaton"), reason="this torch takes a lock of the operating system"
)

# Holds the lock as a build does, until its input ends.
BUILDER = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("building", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch itself would create the lock of an extension."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Path(cpp_extension._get_build_directory("an_extension", False)) / "lock"


def age(lock: Path, seconds: float) -> None:
    lock.touch()
    then = time.time() - seconds
    os.utime(lock, (then, then))


def test_without_a_lock_there_is_no_finding(lock: Path) -> None:
    assert list(build_locks.build_locks()) == []


def test_an_old_lock_that_nobody_holds_is_a_warning_with_the_file_to_delete(lock: Path) -> None:
    age(lock, 3600)
    (finding,) = build_locks.build_locks()
    assert finding.verdict == WARNING
    assert str(lock) in finding.found and "1.00 h" in finding.found
    assert f"rm '{lock}'" in finding.remedy
    assert "if no other node, container or user is building" in finding.remedy
    assert (
        "no process that is visible from here" in finding.found and "if a build was killed" in finding.found
    )
    assert finding in doctor.examine(doctor.parser().parse_args([str(lock.parent)]), 0)


def test_a_recent_lock_that_nobody_holds_may_be_a_build_of_another_node(lock: Path) -> None:
    age(lock, 60)
    (finding,) = build_locks.build_locks()
    assert finding.verdict == NOTE and str(lock) in finding.remedy and "other node" in finding.remedy


@pytest.mark.slow
def test_a_build_that_goes_on_is_sound_and_a_killed_one_is_not(lock: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None and builder.stdout.readline() == "building\n"
        age(lock, 3600)
        (finding,) = build_locks.build_locks()
        assert finding.verdict == GOOD and f"process {builder.pid} " in finding.found and not finding.remedy
        builder.kill()
    (finding,) = build_locks.build_locks()
    assert finding.verdict == WARNING


def test_the_directory_of_the_environment_is_searched(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "chosen"))
    other = Path(cpp_extension._get_build_directory("an_extension", False)) / "lock"
    age(lock, 3600)
    age(other, 3600)
    (finding,) = build_locks.build_locks()
    assert str(other) in finding.found


def test_a_torch_that_takes_locks_of_the_system_leaves_files_that_mean_nothing(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    age(lock, 3600)
    monkeypatch.delattr(cpp_extension, "FileBaton")
    assert list(build_locks.build_locks()) == []
