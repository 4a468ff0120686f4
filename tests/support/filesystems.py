"""Small file systems, their free space, and conditions that come true by themselves."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Mounts:
    """Mounts file systems; skips where this user may not, or a command is missing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.points: list[Path] = []

    def small(self, nbytes: int, options: str = "") -> Path:
        """A tmpfs of a given size (bytes)."""
        return self._mount("-t", "tmpfs", "-o", f"size={nbytes}{options}", "tmpfs")

    def drive(self, nbytes: int) -> Path:
        """An ext4 of a given size (bytes) in a file, on a loop device."""
        image = self.directory / f"image{len(self.points)}"
        with image.open("wb") as file:
            file.truncate(nbytes)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        return self._mount("-o", "loop", str(image))

    def _mount(self, *what: str) -> Path:
        point = self.directory / f"mount{len(self.points)}"
        point.mkdir()
        _run("mount", *what, str(point))
        self.points.append(point)
        return point


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"a file system of a chosen size needs {command[0]}")
    if done.returncode:
        pytest.skip(f"a file system of a chosen size cannot be made here: {done.stderr.strip()}")


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """File systems of a chosen size, which go after the test."""
    made = Mounts(tmp_path)
    yield made
    for point in made.points:
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
