"""Ranks come from whoever launched."""

from __future__ import annotations

import pytest

from ssdtrain import ranks

LAUNCHERS = {
    "torchrun": {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"},
    "DeepSpeed": {"LOCAL_RANK": "3", "LOCAL_SIZE": "8"},
    "srun": {"SLURM_LOCALID": "3", "SLURM_NTASKS_PER_NODE": "8"},
    "Open MPI": {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
    "MPICH": {"MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "8"},
}


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in LAUNCHERS.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SLURM_TASKS_PER_NODE", raising=False)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launchers_variables_are_read(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    assert (ranks.local_rank(), ranks.local_world_size()) == (3, 8)


def test_a_process_of_its_own_is_the_only_rank() -> None:
    assert (ranks.global_rank(), ranks.local_rank(), ranks.local_world_size()) == (0, 0, 1)


@pytest.mark.parametrize(("tasks", "most"), [("8", 8), ("4(x3)", 4), ("2,8(x16),4", 8), ("", 1)])
def test_srun_says_how_many_tasks_each_kind_of_node_has(
    tasks: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    assert ranks.local_world_size() == most
