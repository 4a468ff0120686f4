"""Starts the ranks of a test, each an ordinary process, and waits for all of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(world: int, command: Sequence[str], timeout: float = 280, **environment: str) -> str:
    """Run `python COMMAND` as `world` ranks, as torchrun would; what they printed, rank by rank.

    Raises:
        AssertionError: a rank failed or did not end in time; the others are ended, and the message has what all printed.
    """
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        **environment,
    }
    ranks = []
    for rank in range(world):
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below, when it has been read)
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        ranks.append((process, output))
    waiting = {process for process, _ in ranks}
    failed = False
    try:
        while waiting and not failed:
            first = next(iter(waiting))
            try:
                first.wait(0.2)
            except subprocess.TimeoutExpired:
                timeout -= 0.2
                failed = timeout <= 0
            # A rank that failed leaves the others waiting for it.
            failed = failed or any(process.poll() not in (None, 0) for process in waiting)
            waiting = {process for process in waiting if process.poll() is None}
    finally:
        for process in waiting:
            process.kill()
            process.wait()
    texts = []
    for rank, (process, output) in enumerate(ranks):
        output.seek(0)
        texts.append(f"--- rank {rank}, exit status {process.returncode}\n{output.read()}")
        output.close()
    text = "\n".join(texts)
    assert not failed, f"{' '.join(command)}: a rank failed or did not end in time\n{text[-20000:]}"
    return text
