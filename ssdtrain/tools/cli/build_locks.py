"""Locks in torch's cache of compiled extensions that a killed process has left: every later build waits for them, without end
and without a message.

torch.utils.cpp_extension compiles an extension at its first use, and creates a file `lock` in the extension's directory
meanwhile. Whoever finds the file waits until it is gone, so one that a kill has left stops every start that uses this
extension (pytorch issue 189245; so it is in torch 2.13). In torch 2.15 it is a lock of the operating system, which a dead
process does not hold; there the file is never removed and means nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from ssdtrain.text import duration_text
from ssdtrain.tools.cli.finding import GOOD, NOTE, WARNING, Finding

__all__ = ["build_locks"]

SUBJECT = "torch extension build lock"
BUILD_SECONDS = 600
"""A lock that is older, and that no process seen here holds, is suspect: most builds take less."""
UNSEEN = "no process that is visible from here holds it"
"""Processes of other nodes, containers and users cannot be seen."""


def build_locks() -> Iterator[Finding]:
    """A finding for each lock that this interpreter's torch would wait for."""
    locks = list(_locks())
    if not locks or not _torch_waits_for_files():
        return
    holders = _holders()
    for lock in locks:
        try:
            age = max(0.0, time.time() - lock.stat().st_mtime)
        except FileNotFoundError:
            continue  # that build has ended
        yield _finding(lock, age, holders.get(os.path.realpath(lock)))


def _finding(lock: Path, age: float, holder: int | None) -> Finding:
    since = f"{lock} ({duration_text(age)} old)"
    if holder is not None:
        return Finding(SUBJECT, f"{since}: process {holder} is building", GOOD)
    remedy = f"if no other node, container or user is building: rm '{lock}'"
    if age < BUILD_SECONDS:
        return Finding(SUBJECT, f"{since}: {UNSEEN}", NOTE, remedy)
    why = f"{UNSEEN}; if a build was killed, every start that uses this extension waits for ever"
    return Finding(SUBJECT, f"{since}: {why}", WARNING, remedy)


def _locks() -> Iterator[Path]:
    """Where torch.utils.cpp_extension has the locks of this version of Python."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen is not None:
        yield from sorted(Path(chosen).glob("*/lock"))
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    version = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    yield from sorted((cache / "torch_extensions").glob(f"{version}_*/*/lock"))


def _torch_waits_for_files() -> bool:
    try:
        return hasattr(import_module("torch.utils.cpp_extension"), "FileBaton")
    except ImportError:  # without setuptools nothing is compiled
        return False


def _holders() -> dict[str, int]:
    """Path of every file that a process of this node has open -> a process that has it. A builder keeps its lock open.

    Only links are read: a `stat` could hang on a file system that does not answer. Processes of other users are left out.
    """
    found = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    found[os.readlink(f"/proc/{process}/fd/{descriptor}")] = int(process)
    return found
