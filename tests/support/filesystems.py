"""Small file systems, their free space, and conditions that come true by themselves."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a tmpfs of a given size (bytes); skips where this user may not mount."""
    mounted: list[Path] = []

    def mount(nbytes: int, options: str = "") -> Path:
        point = tmp_path / f"mount{len(mounted)}"
        point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}{options}", "tmpfs", str(point)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("a file system of a chosen size needs the mount command")
        if done.returncode:
            pytest.skip(f"a file system of a chosen size needs the right to mount: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield mount
    for point in mounted:
        subprocess.run(["umount", "-l", str(point)], check=True)


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bfree * status.f_frsize


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether the condition came true. The time is a limit for hanging tests, not a measurement."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
