"""What containers take away: system calls that their seccomp profile denies, and /proc."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdtrain.storage import check_host_budget, drive_of
from tests.support.processes import ROOT

Spawn = Callable[..., subprocess.Popen[str]]

WRITE_AND_READ = """
    import os, sys
    sys.path.insert(0, sys.argv[4])
    from ssdtrain.storage import Arena, SpillStore
    from tests.support.seccomp import deny
    directory, engine, calls, _ = sys.argv[1:]
    arena = Arena(32 << 20)
    deny(*calls.split(","))
    with SpillStore([directory], engine=engine, capacity=64 << 20) as store:
        source = arena.acquire((9 << 20) + 5, page_offset=64)
        target = arena.acquire((9 << 20) + 5, page_offset=64)
        source.view()[:] = os.urandom(source.nbytes)
        slot = store.reserve(source.nbytes)
        store.write(slot, source.address, verify=True).wait(30)
        store.read(slot, target.address).wait(30)
        assert bytes(target.view()) == bytes(source.view())
        store.free(slot)
    print("equal")
"""


def outcome(spawn: Spawn, directory: Path, engine: str, *calls: str, script: str = WRITE_AND_READ) -> str:
    """What the script printed, or the end of its traceback."""
    process = spawn(script, directory, engine, ",".join(calls), ROOT)
    printed, errors = process.communicate(timeout=120)
    return printed.strip() or errors.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls", [["process_vm_readv"], ["fallocate"], ["process_vm_readv", "fallocate"]], ids=" ".join
)
def test_a_call_that_there_is_a_way_without_may_be_denied(
    spawn: Spawn, tmp_path: Path, engine: str, calls: list[str]
) -> None:
    assert outcome(spawn, tmp_path, engine, *calls) == "equal"


@pytest.mark.slow
def test_calls_that_there_is_no_way_without_are_an_error_at_start_with_a_line_for_each(
    spawn: Spawn, tmp_path: Path, engine: str
) -> None:
    text = outcome(spawn, tmp_path, engine, "process_vm_readv", "pipe2")
    assert "process_vm_readv: Operation not permitted\n  pipe2: Operation not permitted" in text
    assert "seccomp" in text and "healthy" not in text


@pytest.mark.slow
def test_an_advice_that_the_kernel_denies_is_an_error_with_the_size_and_the_remedy(
    spawn: Spawn, tmp_path: Path, engine: str
) -> None:
    script = WRITE_AND_READ.replace("    arena = Arena(32 << 20)\n    deny", "    deny").replace(
        'split(","))', 'split(","))\n    arena = Arena(32 << 20)'
    )
    text = outcome(spawn, tmp_path, engine, "madvise", script=script)
    assert f"madvise(MADV_DONTFORK) on {32 << 20} bytes failed: Operation not permitted" in text
    assert "seccomp" in text


def test_without_proc_what_ranks_need_is_compared_with_the_memory_of_the_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = tmp_path / "proc"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            budget = check_host_budget(1 << 20, 1, proc=nowhere, sysfs=tmp_path)
    assert budget.available > 1 << 20
    [warning] = [record.getMessage() for record in caplog.records]
    assert str(nowhere) in warning and "mount /proc" in warning


def test_without_proc_a_container_is_limited_by_its_own_cgroup(tmp_path: Path) -> None:
    group = tmp_path / "fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{3 << 30}\n")
    (group / "memory.current").write_text(f"{1 << 30}\n")
    assert check_host_budget(1, 1, proc=tmp_path / "proc", sysfs=tmp_path).cgroup == 2 << 30


def test_without_proc_a_directory_still_has_a_drive(tmp_path: Path) -> None:
    drive = drive_of(tmp_path, proc=tmp_path / "proc")
    assert drive.directory == str(tmp_path.resolve()) and drive.size > 0
    assert drive.device == drive_of(tmp_path).device
