"""A process that moves bytes to a drive and back while another one computes: what any offload to that drive costs at the least.

It shares no memory and no interpreter with the process that computes, so what it takes from it is what the machine takes:
memory bandwidth, caches, cores that share their parts, and the drive's own work.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssdtrain.config.units import MiB

PIECE = 4 * MiB

FORWARD = 1 / 3
"""Of a step, in which its bytes are written; they are read in the rest."""


class Mover:
    """Moves bytes in another process, past the page cache.

    Args:
        directory: on the drive.
    """

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.beside", str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def moves(self, nbytes: int, seconds: float) -> Iterator[None]:
        """Write `nbytes` and read them, spread over a step of `seconds`; the body ends when both the step and that have ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{nbytes} {seconds}\n")
        self._process.stdin.flush()
        yield
        if self._process.stdout.readline() != "moved\n":
            raise RuntimeError(f"the process that moves bytes ended: {self._process.wait()}")

    def close(self) -> None:
        self._process.communicate()


def move(file: int, piece: memoryview, nbytes: int, seconds: float) -> None:
    """Write and read so many bytes, each piece at its time."""
    began, pieces = time.monotonic(), max(1, nbytes // len(piece))
    for index in range(2 * pieces):
        turn, reads = index % pieces, index >= pieces
        due = FORWARD * turn / pieces if not reads else FORWARD + (1 - FORWARD) * turn / pieces
        time.sleep(max(0.0, began + seconds * due - time.monotonic()))
        (os.preadv if reads else os.pwritev)(file, [piece], turn * len(piece))


def main() -> None:
    path = Path(sys.argv[1]) / f"beside-{os.getpid()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    path.unlink()
    piece = memoryview(mmap.mmap(-1, PIECE))
    piece[:] = os.urandom(PIECE)
    for line in sys.stdin:
        nbytes, seconds = line.split()
        move(file, piece, int(nbytes), float(seconds))
        print("moved", flush=True)


if __name__ == "__main__":
    main()
