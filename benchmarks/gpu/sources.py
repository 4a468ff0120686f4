"""A digest of the sources in this tree: `python benchmarks/gpu/sources.py`. Needs neither git nor an installed package."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["CHECKED", "MEASURED", "digest"]

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("ssdtrain", "benchmarks")
"""Folders that a row of the benchmark depends on."""
CHECKED = (*MEASURED, "tests", "scripts")
"""Folders that a step of scripts/gpu_check.sh depends on."""
SUFFIXES = {".py", ".c", ".h", ".sh"}


def digest(folders: tuple[str, ...], root: Path = ROOT) -> str:
    """12 hexadecimal digits that change with the name or the content of any source in these folders."""
    found = hashlib.sha256()
    files = [file for folder in folders for file in (root / folder).rglob("*") if file.suffix in SUFFIXES]
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(f"{file.relative_to(root)} {content}\n".encode())
    return found.hexdigest()[:12]


if __name__ == "__main__":
    print(digest(CHECKED))
