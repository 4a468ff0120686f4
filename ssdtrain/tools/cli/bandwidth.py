"""How fast a directory's drive writes and reads: `ssdtrain doctor --measure`."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ssdtrain.config.units import MiB
from ssdtrain.storage.slab import direct_io_error, open_nameless

__all__ = ["LEAST", "measure"]

BLOCK = 8 * MiB
THREADS = 4
LEAST = THREADS * BLOCK
"""Bytes: a block for each thread."""


def measure(directory: Path, nbytes: int) -> tuple[float, float]:
    """(written, read) bytes per second, by four threads in blocks of 8 MiB of a nameless file that is gone afterwards; direct I/O
    where the file system has it.

    Raises:
        OSError: the drive is full or fails.
    """
    descriptor = open_nameless(directory)
    try:
        direct_io_error(descriptor)  # switches the file to direct I/O where that works
        blocks = range(0, max(LEAST, nbytes // BLOCK * BLOCK), BLOCK)
        with ThreadPoolExecutor(THREADS) as threads:
            written = _timed(threads, blocks, lambda memory, at: os.pwritev(descriptor, [memory], at))
            began = time.perf_counter()
            os.fdatasync(descriptor)
            written += time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            read = _timed(threads, blocks, lambda memory, at: os.preadv(descriptor, [memory], at))
    finally:
        os.close(descriptor)
    return len(blocks) * BLOCK / written, len(blocks) * BLOCK / read


def _timed(threads: ThreadPoolExecutor, blocks: range, transfer: Callable[[mmap.mmap, int], int]) -> float:
    def some(first: int) -> None:
        with mmap.mmap(-1, BLOCK) as memory:  # page-aligned, as direct I/O requires
            memory[:] = os.urandom(4096) * (BLOCK // 4096)
            for at in blocks[first::THREADS]:
                moved = transfer(memory, at)
                if moved != BLOCK:
                    raise OSError(f"{moved} of {BLOCK} bytes were transferred at offset {at}")

    began = time.perf_counter()
    list(threads.map(some, range(THREADS)))
    return time.perf_counter() - began
