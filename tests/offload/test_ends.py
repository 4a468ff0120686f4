"""However a training ends, and whenever: its space comes back, and no process of it remains."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.filesystems import Mounts, eventually, free_bytes

MiB = 1 << 20

ENDS = {
    "SIGKILL": (signal.SIGKILL, -signal.SIGKILL),
    "SIGTERM": (signal.SIGTERM, -signal.SIGTERM),
    "Ctrl-C": (signal.SIGINT, 4),
    "exception": (signal.SIGUSR1, 3),
}
"""The signal, and the exit status that it has to lead to."""


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    """A process that forks trainings; see `tests.offload.victim`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.offload.victim"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
        process.communicate()


def end_at_random(
    nursery: subprocess.Popen[str], mount: Path, end: str, engine: str, moments: int, seed: int
) -> None:
    number, status = ENDS[end]
    draw = random.Random(seed)
    empty = free_bytes(mount)
    for _ in range(moments):
        nursery.stdin.write(f"{mount} {engine}\n")
        nursery.stdin.flush()
        pid = int(nursery.stdout.readline())
        assert eventually(lambda: free_bytes(mount) < empty, 60), "the training never began"
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(pid, number)
        found = nursery.stdout.readline()
        assert os.waitstatus_to_exitcode(int(found)) == status
        assert eventually(lambda: free_bytes(mount) == empty), "space is held after the end"
        assert os.listdir(mount) == []
        assert not Path(f"/proc/{pid}").exists()


def close(nursery: subprocess.Popen[str]) -> None:
    """It has ended its last training, and has nothing to complain of."""
    _, err = nursery.communicate(timeout=60)
    assert nursery.returncode == 0
    assert "Exception ignored" not in err and "Fatal" not in err, err


@pytest.mark.long
def test_a_training_that_is_ended_leaves_nothing(nursery: subprocess.Popen[str], mounts: Mounts) -> None:
    mount = mounts.small(64 * MiB)
    for seed, end in enumerate(ENDS):
        end_at_random(nursery, mount, end, "c", moments=2, seed=seed)
    close(nursery)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("end", ENDS)
def test_a_training_that_is_ended_at_a_hundred_moments_leaves_nothing(
    end: str, engine: str, nursery: subprocess.Popen[str], mounts: Mounts
) -> None:
    end_at_random(nursery, mounts.small(64 * MiB), end, engine, moments=100 if engine == "c" else 25, seed=2)
    close(nursery)
