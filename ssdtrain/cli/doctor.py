"""`ssdtrain doctor`: checks installed packages, compiled extensions, hardware and spill directories."""

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ssdtrain import __version__, ranks
from ssdtrain.cli.bandwidth import measure
from ssdtrain.cli.finding import BROKEN, GOOD, NOTE, WARNING, Finding
from ssdtrain.cli.limits import limits
from ssdtrain.cli.versions import OLDEST, TESTED, installed, too_old
from ssdtrain.config import ConfigError, load_config
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.paths import (
    WRITABLE_ALLOWED,
    expand_path,
    nearest_existing,
    parse_directory,
    problem_with_directory,
    problem_with_writing,
)
from ssdtrain.config.units import GiB, parse_size
from ssdtrain.preflight import check_start
from ssdtrain.storage import drive_of
from ssdtrain.storage.memory import HUGE_PAGES
from ssdtrain.storage.slab import direct_io_error, open_nameless
from ssdtrain.telemetry.text import size_text

SLOW_BYTES_PER_SECOND = GiB
EXAMPLES = """examples:
  ssdtrain doctor /local_nvme/spill                 this machine, and that directory
  ssdtrain doctor /local_nvme/spill --measure 4GiB  and how fast it writes and reads
  ssdtrain doctor --config ds.json --json           can that config be used here? status 1 if not
"""
STYLES = {GOOD: "green", NOTE: "dim", WARNING: "yellow", BROKEN: "bold red"}


def run(arguments: list[str]) -> int:
    """Exit status: 1 if a finding is broken, else 0."""
    parser = argparse.ArgumentParser(
        prog="ssdtrain doctor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directories", nargs="*", type=Path, default=[Path(".")], help="of the config; else this one"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="check this YAML or JSON file, or the ssdtrain block in it",
    )
    parser.add_argument(
        "--measure",
        nargs="?",
        const="512MiB",
        metavar="SIZE",
        help="write and read so much in each directory, and say how fast; by default 512MiB",
    )
    chosen = parser.parse_args(arguments)
    try:
        size = parse_size(chosen.measure) if chosen.measure else 0
    except InvalidValue as error:
        parser.error(f"--measure {chosen.measure}: {error}")
    findings = [*software(), *extensions(), *hardware(), *limits()]
    if chosen.config is not None:
        findings += config_file(chosen.config)
    for directory in chosen.directories:
        findings += drive(directory, size)
    broken = any(finding.verdict == BROKEN for finding in findings)
    if chosen.json:
        print(json.dumps({"broken": broken, "findings": [asdict(finding) for finding in findings]}))
    else:
        show(findings, Console())
    return 1 if broken else 0


def software() -> Iterator[Finding]:
    yield Finding("ssdtrain", __version__, GOOD)
    old = sys.version_info < (3, 10)
    yield Finding(
        "python", platform.python_version(), BROKEN if old else GOOD, "3.10 or newer is needed" if old else ""
    )
    for package, tested in TESTED.items():
        yield version_finding(package, installed(package), tested)
    for package, use in {
        "matplotlib": "plots",
        "zstandard": "lossless codec",
        "triton": "GPU kernels",
    }.items():
        found = installed(package)
        yield Finding(
            package, found or "not installed", GOOD if found else NOTE, "" if found else f"only for {use}"
        )


def version_finding(package: str, found: str | None, tested: tuple[str, ...]) -> Finding:
    run_with = f"tests were run with {', '.join(tested)}"
    if found is None:
        if package in OLDEST:
            return Finding(package, "not installed", BROKEN, f"install it; {run_with}")
        return Finding(package, "not installed", NOTE, f"only for its users; {run_with}")
    if too_old(package, found):
        return Finding(
            package, found, BROKEN, f"{'.'.join(map(str, OLDEST[package]))} or newer is needed; {run_with}"
        )
    return Finding(package, found, GOOD) if found in tested else Finding(package, found, WARNING, run_with)


def extensions() -> Iterator[Finding]:
    """The C extensions, and the consequence if one is missing."""
    stand_ins = {
        "storage._iopool": ("C I/O engine", "slower, by Python threads"),
        "storage._signal_safe_lock": (
            "signals deferred",
            "after an exception of a signal handler (Ctrl-C) a new runtime has to be created",
        ),
        "codecs._native": ("C codecs", "slower, by plain torch"),
    }
    for module, (name, without) in stand_ins.items():
        try:
            importlib.import_module(f"ssdtrain.{module}")
            yield Finding(name, "built", GOOD)
        except ImportError:
            remedy = f"{without}: install a C compiler and reinstall ssdtrain"
            yield Finding(name, "not built", WARNING, remedy)


def hardware() -> Iterator[Finding]:
    yield from devices()
    yield Finding("processors", str(os.cpu_count()), GOOD)
    state = "unknown"
    if HUGE_PAGES.exists():
        state = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    if state in ("always", "madvise"):
        yield Finding("huge pages", state, GOOD)
    else:
        yield Finding("huge pages", state, WARNING, f"more CPU time per byte: write madvise to {HUGE_PAGES}")


def devices() -> Iterator[Finding]:
    if installed("torch") is None:
        return  # `software` has said so.
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of it is missing.
        yield Finding("torch", f"cannot be imported: {error}", BROKEN, "reinstall torch")
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("CUDA", ", ".join(names), GOOD)
    else:
        yield Finding("CUDA", "no device", NOTE, "training runs on the CPU")


def config_file(file: Path) -> Iterator[Finding]:
    """Whether `file` can be used on this machine, and what its directories are."""
    subject = f"config {file}"
    try:
        config = load_config(file)
        check_start(config, rank=ranks.global_rank(), local_rank=ranks.local_rank())
    except (ConfigError, MemoryError, OSError) as error:
        yield Finding(subject, str(error), BROKEN, "as the text says; all keys are in docs/config.md")
        return
    on = ", ".join(name for name in ("offload", "comm") if getattr(config, name) is not None)
    if not config.active:
        yield Finding(subject, "switches nothing on", WARNING, "give it an offload or a comm section")
        return
    yield Finding(subject, f"can be used: {on}", GOOD)
    if config.offload is not None:
        for directory in config.offload.expand(rank=ranks.global_rank(), local_rank=ranks.local_rank()):
            yield from drive(directory)


def drive(directory: Path, measured_bytes: int = 0) -> Iterator[Finding]:
    """Check a spill directory (~ and placeholders allowed) by creating an unnamed file in it or its nearest existing parent."""
    subject = str(directory)
    try:
        directory = expand_path(
            parse_directory(subject), rank=ranks.global_rank(), local_rank=ranks.local_rank()
        )
    except InvalidValue as error:
        yield Finding(subject, error.why, BROKEN, f"give {error.allowed}")
        return
    why = problem_with_directory(directory) or problem_with_writing(directory)
    if why is not None:
        yield Finding(subject, why, BROKEN, f"give {WRITABLE_ALLOWED}")
        return
    if not directory.exists():
        directory = nearest_existing(directory)
        yield Finding(
            subject, f"does not exist; what follows is about {directory}", NOTE, "training makes it"
        )
    try:
        behind = drive_of(directory)
        descriptor = open_nameless(directory)
    except OSError as error:
        yield Finding(subject, error.strerror or str(error), BROKEN, f"give {WRITABLE_ALLOWED}")
        return
    try:
        reason = direct_io_error(descriptor)
    finally:
        os.close(descriptor)
    memory = behind.filesystem == "tmpfs"
    yield Finding(
        f"{subject}: file system",
        f"{behind.filesystem} on {behind.mount}",
        WARNING if memory else GOOD,
        "this is memory, not a drive: use offload.host instead" if memory else "",
    )
    remedy = f"buffered I/O takes several times the CPU time ({reason})" if reason else ""
    yield Finding(
        f"{subject}: O_DIRECT", "refused" if reason else "works", WARNING if reason else GOOD, remedy
    )
    yield Finding(f"{subject}: free space", size_text(behind.free_bytes()), GOOD)
    if behind.device:
        name = " ".join(part for part in (behind.device, behind.model, size_text(behind.size)) if part)
        slow = (
            "the kernel calls it rotational, which some virtual SSDs are called too"
            if behind.rotational
            else ""
        )
        yield Finding(f"{subject}: drive", name, WARNING if slow else GOOD, slow)
    smart = behind.smart()
    if smart is not None:
        worn = smart.percentage_used >= 90
        found = f"{smart.percentage_used}% of its rating used, {size_text(smart.data_bytes_written)} written"
        yield Finding(
            f"{subject}: wear", found, WARNING if worn else GOOD, "near its rated end" if worn else ""
        )

    if measured_bytes:
        yield speed(subject, directory, measured_bytes)


def speed(subject: str, directory: Path, nbytes: int) -> Finding:
    """What the drive behind an existing directory writes and reads a second."""
    try:
        written, read = measure(directory, nbytes)
    except OSError as error:
        return Finding(
            f"{subject}: bandwidth", str(error), BROKEN, f"free {size_text(nbytes)} there, or check the drive"
        )
    found = f"writes {size_text(written)}/s, reads {size_text(read)}/s"
    slow = written < SLOW_BYTES_PER_SECOND
    remedy = "slow for activations: lower offload.amount, or use a local NVMe SSD" if slow else ""
    return Finding(f"{subject}: bandwidth", found, WARNING if slow else GOOD, remedy)


def show(findings: list[Finding], console: Console) -> None:
    table = Table("", "found", "", "what to do")
    for finding in findings:
        verdict = f"[{STYLES[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.subject, finding.found, verdict, finding.remedy)
    console.print(table)
