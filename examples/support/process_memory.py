"""Peaks of the process's resident set and of the CUDA allocator, from a chosen moment on.

Note: [A resident set that follows what is alive]
    malloc keeps most of what is freed, so after some steps the resident set says little about what is alive: two runs
    whose live tensors differ by 750 MiB differed by 400 to 700. `return_freed_blocks(1 MiB)` at the start of a process makes
    glibc hand every larger block back at once. The page faults then make a step about a quarter slower, so memory is read
    in steps of their own, and `return_freed_blocks(GLIBC_STEADY)` ends that before others are timed. The order matters:
    blocks that were once in the heap go on being reused from it.
"""

import ctypes
import resource
import sys
from pathlib import Path

import torch

from ssdtrain.config.units import MiB

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
GLIBC_STEADY = 32 * MiB
"""Where glibc's own adjustment arrives after a block of that size was freed once (mallopt(3), M_MMAP_THRESHOLD)."""


def return_freed_blocks(threshold: int) -> bool:
    """From now on blocks of at least `threshold` bytes go back to the system when they are freed.

    The end of the heap does when twice as much is free there. Returns whether this C library can (glibc can). See
    Note: [A resident set that follows what is alive].
    """
    return _set_thresholds(threshold, 2 * threshold)


def keep_freed_blocks() -> bool:
    """From now on blocks below `GLIBC_STEADY` stay with the process when they are freed, as those of a GPU stay with torch's
    allocator: no step takes longer than another because its pages are new. Returns whether this C library can."""
    return _set_thresholds(GLIBC_STEADY, 2**31 - 1)


def _set_thresholds(map_from: int, trim_from: int) -> bool:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, map_from) and libc.mallopt(_M_TRIM_THRESHOLD, trim_from))


class PeakMemory:
    """`reset()`, run, then read the peaks.

    Attributes:
        covers: "since reset", or "since start" where the system cannot reset the peak of a process: Linux can
            (writing 5 to /proc/self/clear_refs, see proc(5)), unless a sandbox forbids it.
    """

    covers = "since start"

    def reset(self) -> None:
        try:
            _CLEAR.write_text("5")
            self.covers = "since reset"
        except OSError:
            self.covers = "since start"
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @property
    def resident_bytes(self) -> int:
        """Peak resident set in bytes: VmHWM, or getrusage's where there is no /proc."""
        if _STATUS.exists():
            return _status_bytes("VmHWM")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    @property
    def device_bytes(self) -> int | None:
        """Peak of torch's CUDA allocator in bytes; None without CUDA."""
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(f"{_STATUS} has no line {key}")
