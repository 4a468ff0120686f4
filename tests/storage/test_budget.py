"""The node's host memory is compared with what all ranks ask for, with figures and a remedy."""

import resource
from pathlib import Path

import pytest

from ssdtrain.storage import HostBudgetExceeded, check_host_budget

GiB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """The kernel's files of a machine with 64 GiB available and no cgroup limit."""
    proc, sysfs = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * GiB // 1024} kB\n")
    (proc / "self/cgroup").write_text("0::/job\n")
    (sysfs / "fs/cgroup/job").mkdir(parents=True)
    return proc, sysfs


def write(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(f"{text}\n")


def test_what_fits_is_reported(machine: tuple[Path, Path]) -> None:
    proc, sysfs = machine
    budget = check_host_budget(8 * GiB, 8, proc=proc, sysfs=sysfs)
    assert (budget.required, budget.available, budget.cgroup) == (64 * GiB, 64 * GiB, None)


def test_ranks_count_together(machine: tuple[Path, Path]) -> None:
    proc, sysfs = machine
    with pytest.raises(HostBudgetExceeded, match="MemAvailable") as raised:
        check_host_budget(9 * GiB, 8, proc=proc, sysfs=sysfs)
    text = str(raised.value)
    assert "8 x 9.00 GiB" in text and "72.0 GiB" in text and "64.0 GiB" in text
    assert "lower ssdtrain.offload.host and buffer" in text
    with pytest.raises(
        HostBudgetExceeded, match=r"^ssdtrain\.state\.host would take .* lower ssdtrain\.state\.host"
    ):
        check_host_budget(9 * GiB, 8, subject="ssdtrain.state.host", proc=proc, sysfs=sysfs)


def test_a_version_2_cgroup_limits_and_its_file_cache_counts_as_free(machine: tuple[Path, Path]) -> None:
    proc, sysfs = machine
    write(
        sysfs / "fs/cgroup/job",
        memory__max=16 * GiB,
        memory__current=10 * GiB,
        memory__stat=f"inactive_file {4 * GiB}",
    )
    assert check_host_budget(10 * GiB, 1, proc=proc, sysfs=sysfs).cgroup == 10 * GiB
    with pytest.raises(HostBudgetExceeded, match="cgroup allows"):
        check_host_budget(10 * GiB + 1, 1, proc=proc, sysfs=sysfs)


def test_the_tightest_ancestor_counts(machine: tuple[Path, Path]) -> None:
    proc, sysfs = machine
    write(sysfs / "fs/cgroup/job", memory__max="max", memory__current=0)
    write(sysfs / "fs/cgroup", memory__max=2 * GiB, memory__current=GiB)
    assert check_host_budget(0, 1, proc=proc, sysfs=sysfs).cgroup == GiB


def test_a_version_1_cgroup_limits_and_a_huge_number_means_none(machine: tuple[Path, Path]) -> None:
    proc, sysfs = machine
    (proc / "self/cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    memory = sysfs / "fs/cgroup/memory"
    write(memory, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GiB)
    assert check_host_budget(0, 1, proc=proc, sysfs=sysfs).cgroup is None
    write(
        memory / "job",
        memory__limit_in_bytes=4 * GiB,
        memory__usage_in_bytes=GiB,
        memory__stat="total_inactive_file 0",
    )
    assert check_host_budget(0, 1, proc=proc, sysfs=sysfs).cgroup == 3 * GiB


def test_locked_memory_counts_per_process(
    machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, sysfs = machine
    monkeypatch.setattr(resource, "getrlimit", lambda which: (GiB, GiB))
    check_host_budget(GiB, 8, locked=True, proc=proc, sysfs=sysfs)
    check_host_budget(2 * GiB, 8, proc=proc, sysfs=sysfs)
    with pytest.raises(HostBudgetExceeded, match="ulimit -l"):
        check_host_budget(2 * GiB, 8, locked=True, proc=proc, sysfs=sysfs)


def test_this_machine_answers() -> None:
    budget = check_host_budget(1, 1)
    assert budget.available > 0 and (budget.cgroup is None or budget.cgroup >= 0)
