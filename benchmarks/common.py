"""What benchmarks share: their arguments, medians of paired runs, what machine it was, and the last line as JSON."""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark has."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    arguments.add_argument(
        "--json", action="store_true", help="end with one line that is a JSON object of all figures"
    )
    return arguments


HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""What torch reads, before its first tensor, to ask for huge pages for CPU tensors of 2 MiB and more."""


def huge_pages(arguments: argparse.ArgumentParser) -> None:
    """Add `--huge-pages`; `with_huge_pages` then does what it says."""
    arguments.add_argument(
        "--huge-pages",
        action="store_true",
        help=f"CPU tensors lie in huge pages, for every side of the comparison ({HUGE_PAGES}=1)",
    )


def with_huge_pages(module: str, wanted: bool) -> None:
    """Run `python -m module` again with the variable set, if `wanted` and it is not."""
    if wanted and os.environ.get(HUGE_PAGES) != "1":
        os.environ[HUGE_PAGES] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def page_faults() -> int:
    """Pages that were new to this process so far. What a step that keeps takes depends on how many of them malloc has it fault
    in again, which differs from process to process.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def hardware(directory: str | Path | None = None) -> dict[str, Any]:
    """The machine in a few words: processor, memory, kernel, GPU, and the drive behind `directory`."""
    described: dict[str, Any] = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpu": _gpu(),
        "huge_pages": os.environ.get(HUGE_PAGES) == "1",
    }
    if directory is not None:
        from ssdtrain.storage import drive_of

        drive = drive_of(directory)
        described["drive"] = f"{drive.device or 'no disk'} {drive.model}".strip() + f", {drive.filesystem}"
    return described


def finish(figures: dict[str, Any], as_json: bool) -> None:
    """Print the figures as a list, and as the last line, if asked for, as one JSON object."""
    width = max(len(name) for name in figures)
    for name, value in figures.items():
        print(f"{name:<{width}}  {f'{value:.4g}' if isinstance(value, float) else value}")
    sys.stdout.flush()
    if as_json:
        print(json.dumps(figures), flush=True)


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _gpu() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return (
            subprocess.run(query, capture_output=True, text=True, check=True)
            .stdout.strip()
            .replace("\n", ", ")
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "none"
