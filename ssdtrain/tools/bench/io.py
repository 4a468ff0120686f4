"""The I/O pool on a directory's drive, with fio beside it where it is installed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssdtrain.config.units import MiB
from ssdtrain.storage import Arena, Lease, Operation, Slot, SpillStore, drive_of
from ssdtrain.storage.slab import direct_io_error, open_nameless
from ssdtrain.text import size_text
from ssdtrain.tools.bench.ratios import paired_ratio

DEPTH = 8
"""Transfers under way, of the pool and of fio."""

FIO_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio allocates by malloc; this makes glibc ask for huge pages, as the arena does. fio itself knows hugetlbfs only."""

NO_FIO = "fio is not installed, so there is nothing to compare with: apt install fio, or dnf install fio"

Note = Callable[[str], None]
"""Told what has been done, for a progress line."""


class PoolBench:
    """One store of one engine, with sources and targets of one size for `total` bytes of operations."""

    def __init__(
        self,
        directory: Path,
        engine: str,
        total: int,
        arena: Arena,
        *,
        page_offset: int = 0,
        direct: str = "on",
        event_query: int = 0,
    ) -> None:
        self.total = total
        self.page_offset = page_offset
        self.arena = arena
        self.verify = False
        """Have a checksum of all bytes made by each write and compared by the reads after it."""
        self.event = 0
        """CUDA event that writes wait for, as those from staging buffers do; 0: none."""
        self.store = SpillStore(
            [directory],
            engine=engine,
            threads=DEPTH,
            capacity=2 * total,
            direct=direct,
            event_query=event_query,
        )
        self._slots: dict[int, list[Slot]] = {}
        self._buffers: dict[int, list[Lease]] = {}

    def prepare(self, nbytes: int) -> None:
        """Take slots and a ring of `DEPTH` buffers (fio has as many), and write every slot once."""
        for slots in self._slots.values():
            for slot in slots:
                self.store.free(slot)
        for lease in [lease for leases in self._buffers.values() for lease in leases]:
            lease.release()
        self._slots = {nbytes: [self.store.reserve(nbytes) for _ in range(self.total // nbytes)]}
        self._buffers = {
            nbytes: [
                found
                for _ in range(DEPTH)
                if (found := self.arena.acquire(nbytes, page_offset=self.page_offset)) is not None
            ]
        }
        noise = os.urandom(MiB)
        for lease in self._buffers[nbytes]:
            lease.view()[:] = noise * (nbytes // MiB)
        self.run("write", nbytes)

    def queue(self, direction: str, nbytes: int) -> list[Operation]:
        buffers = self._buffers[nbytes]
        places = [(slot, buffers[n % DEPTH].address) for n, slot in enumerate(self._slots[nbytes])]
        if direction == "read":
            return [self.store.read(slot, address) for slot, address in places]
        return [
            self.store.write(slot, address, after_event=self.event, verify=self.verify)
            for slot, address in places
        ]

    def run(self, direction: str, nbytes: int) -> tuple[float, float]:
        """(bytes per second, CPU seconds of this process per GB) of all operations, queued at once."""
        cpu, start = cpu_seconds(), time.perf_counter()
        for operation in self.queue(direction, nbytes):
            operation.wait()
        seconds = time.perf_counter() - start
        return self.total / seconds, (cpu_seconds() - cpu) / (self.total / 1e9)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fio_command(file: str, size: int | str, direction: str, *, direct: bool = True) -> list[str]:
    """fio with transfers of 4 MiB and the pool's depth. Not `direct`, it reads from the page cache as the pool does: by itself it
    would drop its file from there first."""
    options = (
        f"fio --name=spill --thread --ioengine=libaio --direct={int(direct)} --invalidate={int(direct)} "
        f"--bs=4m --iodepth={DEPTH} --fallocate=posix --overwrite=1 --output-format=json --size={size} --rw={direction}"
    )
    return [*options.split(), f"--filename={file}"]


def run_fio(file: Path, size: int, direction: str, *, direct: bool = True) -> tuple[float, float]:
    """(bytes per second, CPU seconds per GB) of fio's own report.

    Raises:
        subprocess.CalledProcessError: fio failed.
    """
    done = subprocess.run(
        fio_command(str(file), size, direction, direct=direct),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **FIO_HUGE_PAGES},
    )
    job = json.loads(done.stdout)["jobs"][0]
    seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return float(job[direction]["bw_bytes"]), seconds / (size / 1e9)


def measure_io(
    directory: Path, total: int, repeats: int, engine: str = "auto", *, note: Note = lambda _: None
) -> dict[str, Any]:
    """Writes and reads `total` bytes in transfers of 4 MiB, `repeats` times, in turn with fio.

    Args:
        directory: an existing one on the drive; nothing stays in it.

    Raises:
        OSError: the drive is full or fails.
    """
    descriptor = open_nameless(directory)
    try:
        refused = direct_io_error(descriptor)
    finally:
        os.close(descriptor)
    nbytes = 4 * MiB
    total = max(nbytes * DEPTH, total // nbytes * nbytes)
    speeds: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)
    program = shutil.which("fio")
    needed, free = total * (1 if program is None else 2), drive_of(directory).free_bytes()
    if needed > free:
        raise OSError(
            f"{directory} has {size_text(free)} free, and {size_text(needed)} are to be written: give a smaller --size"
        )
    with tempfile.TemporaryDirectory(dir=directory, prefix="ssdtrain-bench-") as name:
        arena = Arena(DEPTH * nbytes)
        try:
            bench = PoolBench(Path(name), engine, total, arena, direct="auto" if refused else "on")
            try:
                bench.prepare(nbytes)
                note("laid out")
                if program is not None:
                    run_fio(Path(name) / "fio", total, "write", direct=not refused)
                for repeat in range(repeats):
                    for direction in ("write", "read"):
                        sides = ["pool", *(["fio"] if program is not None else [])]
                        for side in sides if repeat % 2 == 0 else sides[::-1]:
                            if side == "pool":
                                speed, cpu = bench.run(direction, nbytes)
                            else:
                                speed, cpu = run_fio(Path(name) / "fio", total, direction, direct=not refused)
                            speeds[f"{side}_{direction}"].append(speed)
                            cpus[f"{side}_{direction}"].append(cpu)
                    note(f"round {repeat + 1} of {repeats}")
                chosen = bench.store.pool.engine
            finally:
                bench.store.close()
        finally:
            arena.close(force=True)
    drive = drive_of(directory)
    figures: dict[str, Any] = {
        "directory": str(directory),
        "file_system": drive.filesystem,
        "drive": f"{drive.device or 'none'} {drive.model}".strip(),
        "direct_io": not refused,
        "engine": chosen,
        "bytes": total,
        "fio": program or NO_FIO,
    }
    for direction in ("write", "read"):
        for side in ("pool", "fio"):
            found = speeds[f"{side}_{direction}"]
            figures[f"{side}_{direction}_bytes_per_second"] = statistics.median(found) if found else None
            figures[f"{side}_{direction}_cpu_seconds_per_gb"] = (
                statistics.median(cpus[f"{side}_{direction}"]) if found else None
            )
        theirs = speeds[f"fio_{direction}"]
        figures[f"{direction}_ratio_fio"] = (
            paired_ratio(speeds[f"pool_{direction}"], theirs) if theirs else None
        )
    return figures
