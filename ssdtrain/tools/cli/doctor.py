"""`ssdtrain doctor`: checks installed packages, compiled extensions, hardware and spill directories."""

import argparse
import importlib
import json
import mmap
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from ssdtrain import __version__, ranks
from ssdtrain.comm.topology import node_name
from ssdtrain.config import Config, ConfigError, load_config
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.paths import (
    WRITABLE_ALLOWED,
    expand_path,
    nearest_existing,
    parse_directory,
    problem_with_directory,
    problem_with_writing,
)
from ssdtrain.config.units import GiB, MiB
from ssdtrain.preflight import check_start
from ssdtrain.storage import check_host_budget, drive_of, gpudirect
from ssdtrain.storage.memory import HUGE_PAGES
from ssdtrain.storage.slab import direct_io_error, open_nameless
from ssdtrain.text import size_text
from ssdtrain.tools.cli import network
from ssdtrain.tools.cli.finding import BROKEN, GOOD, NOTE, WARNING, Finding, show
from ssdtrain.tools.cli.options import command_parser, size
from ssdtrain.tools.cli.progress import progress
from ssdtrain.tools.cli.versions import OLDEST, TESTED, installed, too_old

SLOW_BYTES_PER_SECOND = GiB
NODES = Path("/sys/devices/system/node")
FEW_FILES = 4096
_BLOCK = 8 * MiB
THREADS = 4
_LEAST = THREADS * _BLOCK
"""Smallest measured size: a block for each thread, in bytes."""
LITTLE_SPACE = GiB
"""Free bytes of a drive below which offloading soon finds it full."""
_EXAMPLES = """examples:
  ssdtrain doctor /local_nvme/spill                 this machine, and that directory
  ssdtrain doctor /local_nvme/spill --measure 4GiB  and how fast it writes and reads
  ssdtrain doctor --config ds.json --json           can that config be used here? status 1 if not
  torchrun --nnodes 2 --nproc-per-node 8 ... -m ssdtrain.tools.cli doctor /local_nvme/spill
                                                    all nodes in one table, and the bandwidth between ranks
"""


def run(arguments: list[str]) -> int:
    """Exit status: 1 if a finding is broken, on any node, else 0."""
    chosen = parser().parse_args(arguments)
    if network.launched(trusting=chosen.ranks):
        try:
            return in_ranks(chosen, chosen.measure)
        except RuntimeError as error:
            print(f"ssdtrain doctor: {error}", file=sys.stderr)
            return 1
    alone = [*examine(chosen, chosen.measure), *other_ranks()]
    return print_findings(chosen, [("", finding) for finding in alone], [""])


def examine(chosen: argparse.Namespace, size: int) -> list[Finding]:
    """The findings about this machine: software, hardware, limits, config and directories."""
    with progress("examining this machine") as note:
        found = [*software(), *extensions(), *hardware(), *limits(), *network.interfaces()]
        if chosen.config is not None:
            note(str(chosen.config))
            found += config_file(chosen.config)
        for directory in chosen.directories:
            note(f"{directory}{f', writing and reading {size_text(size)}' if size else ''}")
            found += drive(directory, size)
        return found


def in_ranks(chosen: argparse.Namespace, size: int) -> int:
    """Runs on every rank; rank 0 prints the findings of all nodes. Returns the same exit status on every rank."""
    with network.Group() as group:
        # Ranks of a node share its drives: one of them examines the node.
        own = examine(chosen, size) if ranks.local_rank() == 0 else []
        gathered = group.gather((node_name(), own, network.sees_gpu()))
        hosts, _, gpus = zip(*gathered, strict=True)
        with progress("measuring between ranks", dist.get_rank() == 0):
            between = network.between_nodes(group, hosts, gpus)
        status = 0
        if dist.get_rank() == 0:
            of_nodes = {host: found for host, found, _ in gathered if found}
            shown = network.same_everywhere(of_nodes) + [("all", finding) for finding in between]
            status = print_findings(chosen, shown, list(of_nodes))
        # The first rank that ends in error has torchrun end the others: not before the table is shown.
        return group.end(group.gather(status)[0])


def other_ranks() -> Iterator[Finding]:
    """A note where the environment names other ranks, which this command does not examine."""
    if network.launched(trusting=True):
        found = f"RANK {os.environ['RANK']} of WORLD_SIZE {os.environ['WORLD_SIZE']}, but not by torchrun"
        yield Finding(
            "ranks",
            f"{found}: these findings are about this machine only",
            NOTE,
            "to examine all of them: start by torchrun, or give --ranks to each process",
        )


def print_findings(chosen: argparse.Namespace, findings: list[tuple[str, Finding]], nodes: list[str]) -> int:
    """Prints the findings, each with its nodes, as text or JSON. Returns the exit status."""
    broken = any(finding.verdict == BROKEN for _, finding in findings)
    if chosen.json:
        about = [{**asdict(finding), **({"nodes": where} if where else {})} for where, finding in findings]
        print(json.dumps({"broken": broken, "findings": about}))
    else:
        show(findings, Console(), with_nodes=len(nodes) > 1)
    return 1 if broken else 0


def parser() -> argparse.ArgumentParser:
    parser = command_parser("doctor", __doc__, _EXAMPLES)
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        default=[Path(".")],
        help="spill directories to check; default: those of --config, else the working directory",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="without torchrun: connect the processes that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="check this YAML or JSON file, or the ssdtrain block in it",
    )
    parser.add_argument(
        "--measure",
        nargs="?",
        type=size(_LEAST),
        const=512 * MiB,
        default=0,
        metavar="SIZE",
        help="write and read this many bytes in each directory and report the bandwidth; by default 512MiB",
    )
    return parser


def software() -> Iterator[Finding]:
    yield Finding("ssdtrain", __version__, GOOD)
    yield Finding("python", platform.python_version(), GOOD)
    for package, tested in TESTED.items():
        yield version_finding(package, installed(package), tested)
    numpy = installed("numpy")
    missing = "pip install numpy: torch.distributed exchanges Python objects between ranks through it"
    yield Finding.judged("numpy", numpy or "not installed", "" if numpy else missing, BROKEN)
    for package, use in {
        "matplotlib": "plots",
        "zstandard": "lossless codec",
        "tensorboard": "report.tensorboard",
        "triton": "GPU kernels",
    }.items():
        found = installed(package)
        needed = "" if found else f"needed only for {use}"
        yield Finding.judged(package, found or "not installed", needed, NOTE)


def version_finding(package: str, found: str | None, tested: tuple[str, ...]) -> Finding:
    run_with = f"tests were run with {', '.join(tested)}"
    if found is None:
        if package in OLDEST:
            return Finding(package, "not installed", BROKEN, f"install it; {run_with}")
        return Finding(package, "not installed", NOTE, f"needed only to train with it; {run_with}")
    if too_old(package, found):
        oldest = ".".join(map(str, OLDEST[package]))
        return Finding(package, found, BROKEN, f"{oldest} or newer is needed; {run_with}")
    return Finding.judged(package, found, "" if found in tested else run_with)


def extensions() -> Iterator[Finding]:
    """The C extensions, and the consequence if one is missing."""
    stand_ins = {
        "storage._iopool": ("C I/O engine", "slower, by Python threads"),
        "storage._signal_safe_lock": (
            "signals deferred",
            "after an exception of a signal handler (Ctrl-C) a new runtime has to be created",
        ),
        "storage._records": ("C records", "hooks that take longer, by Python"),
        "device._streams": ("copies on CUDA", "hooks that take longer, by Python"),
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
    used = state in ("always", "madvise")
    remedy = "" if used else f"more CPU time per byte: write madvise to {HUGE_PAGES}"
    yield Finding.judged("huge pages", state, remedy)


ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that torch reads settings of its allocator from."""


def devices() -> Iterator[Finding]:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("CUDA", ", ".join(names), GOOD)
        settings = " ".join(os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
        if "expandable_segments:true" in settings.lower():
            yield Finding("device memory", "in expandable segments", GOOD)
        else:
            remedy = (
                "offloaded tensors leave gaps that others do not fit into: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
                " (an H100 reserved 16.0 instead of 19.3 GiB, of which 10.8 were in use)"
            )
            yield Finding("device memory", "in segments of fixed size", NOTE, remedy)
        count = len(names)
        apart = [
            (a, b)
            for a in range(count)
            for b in range(count)
            if a != b and not torch.cuda.can_device_access_peer(a, b)
        ]
        if count > 1:
            found = (
                "all reach each other" if not apart else f"{len(apart)} of {count * (count - 1)} pairs do not"
            )
            remedy = "copies between these go through host memory: see nvidia-smi topo -m" if apart else ""
            yield Finding.judged("GPU to GPU", found, remedy, NOTE)
        why_not = gpudirect.unavailable()
        yield Finding("GPUDirect", why_not or "can be tried", NOTE if why_not else GOOD)
    else:
        yield Finding("CUDA", "no device", NOTE, "training runs on the CPU")


def limits() -> Iterator[Finding]:
    """Yield findings about this process's limits, with what to do where one is low."""
    budget = check_host_budget(0, 1)
    yield Finding("free memory", size_text(budget.available), GOOD)
    if budget.cgroup is not None:
        remedy = "offload.host and offload.buffer of all ranks of this node count against it"
        yield Finding("memory left by the container", size_text(budget.cgroup), GOOD, remedy)
    yield memlock(budget.memlock)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    nodes = len([node for node in NODES.glob("node[0-9]*") if node.is_dir()]) or 1
    remedy = "start each rank on the node of its GPU and drive (numactl, or the launcher's binding)"
    yield Finding("NUMA nodes", str(nodes), GOOD, remedy if nodes > 1 else "")


def memlock(limit: int | None) -> Finding:
    """Judge the bytes that a process may lock; None: no limit."""
    if limit is None:
        return Finding("memlock", "unlimited", GOOD)
    remedy = "enough for CUDA; RDMA needs more: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK= of a service"
    return Finding("memlock", size_text(limit), NOTE, remedy)


def open_files(limit: int) -> Finding:
    """Judge the number of descriptors that a process may have, as getrlimit gives it."""
    unlimited = limit == resource.RLIM_INFINITY
    few = not unlimited and limit < FEW_FILES
    remedy = f"data loaders and collectives open many: ulimit -n {FEW_FILES}" if few else ""
    return Finding.judged("open files", "unlimited" if unlimited else str(limit), remedy)


def config_file(file: Path) -> Iterator[Finding]:
    """Whether `file` can be used on this machine, and what its directories are: everything that is broken in one run."""
    subject = f"config {file}"
    correct = "correct the keys that are named; docs/config.md lists all of them"
    try:
        config = load_config(file)
    except (ConfigError, OSError) as error:
        yield Finding(subject, str(error), BROKEN, correct)
        return
    features = ("offload", "comm", "compact", "state", "plan")
    if not config.active:
        remedy = (
            f"give it a section of these: {', '.join(features)}" if config.enabled else "set enabled to true"
        )
        found_off = "switches nothing on" if config.enabled else "switches nothing on: enabled is false"
        yield Finding(subject, found_off, WARNING, remedy)
        return
    found: list[Finding] = []
    try:
        check_start(config)
    except (ConfigError, MemoryError, OSError) as error:
        found.append(Finding(subject, str(error), BROKEN, correct))
    found += over_capacity(subject, config)
    if config.offload is not None and config.offload.gpudirect == "on" and (why := no_gpudirect()):
        found.append(
            Finding(subject, f'offload.gpudirect is "on", but {why}', BROKEN, 'or set it to "auto" or "off"')
        )
    # Not `section.expand`, which raises where a file is in the way: `drive` has a finding for that.
    directories = [
        expand_path(text, rank=ranks.global_rank(), local_rank=ranks.local_rank())
        for section in (config.offload, config.state)
        if section is not None
        for text in section.directories
    ]
    for directory in dict.fromkeys(directories):
        found += drive(directory)
    if all(finding.verdict != BROKEN for finding in found):
        on = ", ".join(name for name in features if getattr(config, name) is not None)
        yield Finding(subject, f"can be used: {on}", GOOD)
    yield from found


def over_capacity(subject: str, config: Config) -> Iterator[Finding]:
    """Findings about directories with less free space than `capacity`."""
    for section in (config.offload, config.state):
        for text in section.directories if section is not None else ():
            place = expand_path(text, rank=ranks.global_rank(), local_rank=ranks.local_rank())
            free = drive_of(nearest_existing(place)).free_bytes()
            if section is not None and section.capacity is not None and section.capacity > free:
                wanted = f"{section.key}.capacity is {size_text(section.capacity)}, and {size_text(free)} are free in {place}"
                remedy = "a smaller capacity, or leave it out for nine tenths of the free space"
                yield Finding(subject, wanted, WARNING, remedy)


def no_gpudirect() -> str:
    """Why tensors cannot pass between a GPU and the drives here; "" if the probe at start decides."""
    if not torch.cuda.is_available():
        return "there is no CUDA device here: run this where training runs"
    return gpudirect.unavailable()


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
    memory = "this is memory, not a drive: use offload.host instead" if behind.filesystem == "tmpfs" else ""
    yield Finding.judged(f"{subject}: file system", f"{behind.filesystem} on {behind.mount}", memory)
    remedy = f"buffered I/O takes several times the CPU time ({reason})" if reason else ""
    yield Finding.judged(f"{subject}: O_DIRECT", "refused" if reason else "works", remedy)
    if behind.mount == "/":
        remedy = "a full one stops the system: set offload.capacity, or use a directory on a drive of its own"
        yield Finding(f"{subject}: mount", "the disk of /", WARNING, remedy)
    free = behind.free_bytes()
    full = "" if free >= LITTLE_SPACE else "almost full: free space, or give a directory on another drive"
    yield Finding.judged(f"{subject}: free space", size_text(free), full)
    if behind.device:
        name = " ".join(part for part in (behind.device, behind.model, size_text(behind.size)) if part)
        slow = "the kernel calls it rotational, which some virtual SSDs are called too"
        yield Finding.judged(f"{subject}: drive", name, slow if behind.rotational else "")
    smart = behind.smart()
    if smart is not None:
        worn = "near its rated end" if smart.percentage_used >= 90 else ""
        found = f"{smart.percentage_used}% of its rating used, {size_text(smart.data_bytes_written)} written"
        yield Finding.judged(f"{subject}: wear", found, worn)
    if measured_bytes:
        yield speed(subject, directory, measured_bytes)


def speed(subject: str, directory: Path, nbytes: int) -> Finding:
    """What the drive behind an existing directory writes and reads a second."""
    if nbytes > (free := drive_of(directory).free_bytes()):
        found = f"{size_text(nbytes)} are to be written, and {size_text(free)} are free"
        return Finding(f"{subject}: bandwidth", found, BROKEN, "give --measure a smaller size")
    try:
        written, read = measure(directory, nbytes)
    except OSError as error:
        remedy = f"free {size_text(nbytes)} there, or check the drive"
        return Finding(f"{subject}: bandwidth", str(error), BROKEN, remedy)
    found = f"writes {size_text(written)}/s, reads {size_text(read)}/s"
    slow = written < SLOW_BYTES_PER_SECOND
    remedy = "slow for activations: lower offload.amount, or use a local NVMe SSD" if slow else ""
    return Finding.judged(f"{subject}: bandwidth", found, remedy)


def measure(directory: Path, nbytes: int) -> tuple[float, float]:
    """Return (written, read) bytes per second, by four threads in blocks of 8 MiB of a nameless file that is gone afterwards.
    They use direct I/O where the file system has it.

    Raises:
        OSError: the drive is full or fails.
    """
    descriptor = open_nameless(directory)
    try:
        direct_io_error(descriptor)  # switches the file to direct I/O where that works
        blocks = range(0, max(_LEAST, nbytes // _BLOCK * _BLOCK), _BLOCK)
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
    return len(blocks) * _BLOCK / written, len(blocks) * _BLOCK / read


def _timed(threads: ThreadPoolExecutor, blocks: range, transfer: Callable[[mmap.mmap, int], int]) -> float:
    def some(first: int) -> None:
        with mmap.mmap(-1, _BLOCK) as memory:  # page-aligned, as direct I/O requires
            memory[:] = os.urandom(4096) * (_BLOCK // 4096)
            for at in blocks[first::THREADS]:
                moved = transfer(memory, at)
                if moved != _BLOCK:
                    raise OSError(f"{moved} of {_BLOCK} bytes were transferred at offset {at}")

    began = time.perf_counter()
    list(threads.map(some, range(THREADS)))
    return time.perf_counter() - began
