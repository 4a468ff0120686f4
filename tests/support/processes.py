"""Starts the ranks of a test, each a process of its own, and waits for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.two_nodes.ports import free_port

ROOT = Path(__file__).parents[2]


DEVICE = os.environ.get("SSDTRAIN_TEST_DEVICE", "cpu")
"""The device that matrices of the frameworks train on: "cpu", or "cuda" (`make test-cuda`)."""


def environment(world: int) -> dict[str, str]:
    """What torchrun would tell `world` ranks on this node, but for their number."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }


def forked(
    world: int, module: str, *arguments: str, imports: Sequence[str] = (), timeout: float = 280, **more: str
) -> str:
    """Call `MODULE.main(*ARGUMENTS)` in `world` ranks, forked from a process that has imported MODULE and `imports`; what they
    printed, rank by rank. On CUDA devices each imports by itself: what frameworks ask of CUDA at their import forbids a fork.

    Raises:
        AssertionError: a rank failed or did not end in time; the others are ended, and the message has what all printed.
    """
    if DEVICE == "cuda":
        return start(world, ["-m", module, *arguments], timeout, **more)
    with tempfile.TemporaryDirectory(prefix="ssdtrain-ranks-") as directory:
        command = ["-m", "tests.support.forked", directory, ",".join(imports), module, *arguments]
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**environment(world), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        statuses: list[int | None] = [None] * world
        try:
            said, _ = process.communicate(timeout=timeout)
            if not process.returncode:
                statuses = json.loads(Path(directory, "statuses").read_text())
        except subprocess.TimeoutExpired:
            said = f"did not end in {timeout:g} seconds"
        finally:
            if None in statuses:  # ranks may be left
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        outputs = [Path(directory, str(rank)) for rank in range(world)]
        texts = [output.read_text(errors="replace") if output.exists() else "" for output in outputs]
    return _checked(f"{module} {' '.join(arguments)}", statuses, texts, said)


def ran(command: Sequence[str], timeout: float = 280, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, as `subprocess.run` does, and read all that it prints.

    Raises:
        AssertionError: it failed; the message has what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done


def start(world: int, command: Sequence[str], timeout: float = 280, **more: str) -> str:
    """Run `python COMMAND` as `world` ranks, as torchrun would; what they printed, rank by rank.

    Raises:
        AssertionError: a rank failed or did not end in time; the others are ended, and the message has what all printed.
    """
    common = {**environment(world), **more}
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
    for _, output in ranks:
        output.seek(0)
        texts.append(output.read())
        output.close()
    return _checked(" ".join(command), [process.returncode for process, _ in ranks], texts, "")


def _checked(what: str, statuses: Sequence[int | None], texts: Sequence[str], said: str) -> str:
    parts = [
        f"--- rank {rank}, exit status {status}\n{text}"
        for rank, (status, text) in enumerate(zip(statuses, texts, strict=True))
    ]
    text = "\n".join(parts)
    assert not any(status != 0 for status in statuses), (
        f"{what}: a rank failed or did not end in time. {said}\n{text[-20000:]}"
    )
    return text
