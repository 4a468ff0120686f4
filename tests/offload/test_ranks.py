"""What one rank's bad drive does to the others: nothing where its bytes can stay in memory, else all end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_nodes.ports import free_port
from tests.offload.ranks import NO_PLAN, SICK

ROOT = Path(__file__).parents[2]

# The process groups' own timeout is 30 minutes: who ends within this did not wait for it.
PROMPT = 150.0

Start = Callable[..., "list[subprocess.Popen[str]]"]

pytestmark = pytest.mark.distributed


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts every rank of a world as a process of its own; what is left of them ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start_world(world: int, *scenarios: str) -> list[subprocess.Popen[str]]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(world):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.offload.ranks", str(tmp_path / "drives"), *scenarios],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
        return list(started)

    yield start_world
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def shown(processes: list[subprocess.Popen[str]]) -> dict[tuple[str, int], dict[str, Any]]:
    """By (scenario, rank) what the ranks printed; all of them ended well."""
    found = {}
    for process in processes:
        out, err = process.communicate(timeout=PROMPT)
        assert process.returncode == 0, err
        for line in out.splitlines():
            if line.startswith("{"):
                figures = json.loads(line)
                found[figures["scenario"], figures["rank"]] = figures
    return found


@pytest.mark.slow
def test_a_full_or_failing_drive_on_one_rank_changes_no_bit_on_any(start: Start) -> None:
    """The collectives of all ranks match: the engine decides alone, and never asks the others."""
    world = 2
    found = shown(start(world, "plain", "full", "failing writes"))
    for scenario in ("full", "failing writes"):
        for rank in range(world):
            ours, plain = found[scenario, rank], found["plain", rank]
            assert ours["losses"] == plain["losses"]
            assert (ours["kept"] > 0) == (rank == SICK), (
                "only the rank with the bad drive keeps what has no room"
            )
            assert rank == SICK or ours["loaded"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        ("failing reads", "IOFailure: read of"),
        pytest.param("raise when full", "StoreFull: no room", marks=pytest.mark.long),
        pytest.param(
            NO_PLAN, f"NoPlan: ssdtrain.plan on rank {SICK}: no plan keeps to 1KiB", marks=pytest.mark.long
        ),
    ],
)
def test_a_rank_that_raises_takes_the_others_down_at_once(start: Start, scenario: str, error: str) -> None:
    """It ends, its connections close, and whoever waits for it in a collective gets an error instead of a timeout."""
    processes = start(3, scenario)
    ends = [process.communicate(timeout=PROMPT) for process in processes]
    assert all(process.returncode == 1 for process in processes)
    for rank, (_, err) in enumerate(ends):
        assert (error in err) == (rank == SICK), err
        if rank != SICK:
            assert "onnection" in err or "peer" in err, err
