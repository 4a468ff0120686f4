"""The I/O engine beside fio: throughput both ways, the same under a Python-busy main thread, CPU seconds per GB.

Both sides use O_DIRECT, the same file system, the same depth, files that were written once before, and rings of buffers on
transparent huge pages (fio gets its own from glibc by a tunable). Runs interleave; each ratio is the median over neighbours in
time. "Unaligned" buffers lie at 64 mod 4096, as torch's CPU tensors do.

`--verify` measures the checksums of all bytes instead (`offload.verify: "all"`), and needs no fio: the same transfers with and
without them in turn, from staging buffers (behind an event, as with a GPU) and from unaligned memory of others (as CPU tensors,
which the workers have to copy to read them safely). What a single pass over the bytes takes on one core is beside it: no checksum
can take less.
"""

import contextlib
import ctypes
import functools
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import finish, hardware, parser
from ssdtrain.storage import Arena
from ssdtrain.tools.bench.io import DEPTH, FIO_HUGE_PAGES, PoolBench, cpu_seconds, fio_command
from ssdtrain.tools.bench.io import run_fio as fio
from ssdtrain.tools.bench.ratios import paired_ratio

MiB = 1 << 20


class Bench(PoolBench):
    """Also under a busy main thread."""

    def run_busy(self, direction: str, nbytes: int) -> float:
        """Bytes per second while the main thread runs Python and looks at the operations every 100 microseconds."""
        start = time.perf_counter()
        operations = self.queue(direction, nbytes)
        while not all(operation.done() for operation in operations[::-1]):
            python_work()
        return self.total / (time.perf_counter() - start)


def python_work(count: int = 2000) -> int:
    """Pure Python for about 100 microseconds."""
    total = 0
    for n in range(count):
        total += n * n % 7
    return total


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{text}: {time.perf_counter() - start:.0f} s", flush=True)


def beside_fio(bench: Bench, unaligned: Bench, python: Bench, file: Path, repeats: int) -> dict[str, Any]:
    """Throughput at 4 MiB (fio's size) and 16 MiB beside fio: of the C engine, also unaligned, and of the Python engine."""
    benches = {"c": bench, "unaligned": unaligned, "python": python}
    speeds: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)

    def note(name: str, measure: Callable[[], tuple[float, float]]) -> None:
        speed, cpu = measure()
        speeds[name].append(speed)
        cpus[name].append(cpu)

    for direction in ("write", "read"):
        fio(file, bench.total, direction)  # lays the file out
    for nbytes in (4 * MiB, 16 * MiB):
        for side in benches.values():
            side.prepare(nbytes)
        for repeat in range(repeats):
            for direction in ("write", "read"):
                sides: dict[str, Callable[[], tuple[float, float]]]
                sides = {"fio": functools.partial(fio, file, bench.total, direction)}
                sides |= {
                    name: functools.partial(side.run, direction, nbytes) for name, side in benches.items()
                }
                # The order turns, so that no side always runs in another's wake.
                names = list(sides)
                for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                    note(f"{name}_{direction}_{nbytes // MiB}", sides[name])
    figures: dict[str, Any] = {}
    for direction in ("write", "read"):
        for size in (4, 16):
            for name, prefix in (("c", ""), ("unaligned", "unaligned_")):
                ratio = paired_ratio(speeds[f"{name}_{direction}_{size}"], speeds[f"fio_{direction}_{size}"])
                figures[f"{prefix}{direction}_ratio_fio" + ("" if size == 4 else f"_{size}MiB")] = ratio
        figures[f"{direction}_gb_per_s"] = statistics.median(speeds[f"c_{direction}_4"]) / 1e9
        figures[f"fio_{direction}_gb_per_s"] = statistics.median(speeds[f"fio_{direction}_4"]) / 1e9
        figures[f"python_engine_{direction}_ratio"] = paired_ratio(
            speeds[f"python_{direction}_4"], speeds[f"fio_{direction}_4"]
        )
        for name in (*benches, "fio"):
            figures[f"{name}_{direction}_cpu_s_per_gb"] = statistics.median(cpus[f"{name}_{direction}_4"])
    figures["cpu_s_per_gb"] = (figures["c_write_cpu_s_per_gb"] + figures["c_read_cpu_s_per_gb"]) / 2
    return figures


def under_python(bench: Bench, repeats: int, name: str = "busy") -> dict[str, Any]:
    """Throughput while the main thread runs Python over that while it waits, at 2 and 16 MiB; the smaller is the headline."""
    figures: dict[str, Any] = {}
    for nbytes in (2 * MiB, 16 * MiB):
        bench.prepare(nbytes)
        for direction in ("write", "read"):
            idle, busy = [], []
            for _ in range(repeats):
                idle.append(bench.run(direction, nbytes)[0])
                busy.append(bench.run_busy(direction, nbytes))
            figures[f"{name}_{direction}_ratio_{nbytes // MiB}MiB"] = paired_ratio(busy, idle)
    for direction in ("write", "read"):
        figures[f"{name}_{direction}_ratio"] = min(
            figures[f"{name}_{direction}_ratio_{size}MiB"] for size in (2, 16)
        )
    return figures


def submission(bench: Bench, nbytes: int = 2 * MiB, count: int = 200) -> dict[str, Any]:
    """Median microseconds that the caller's thread spends in reserve, write and free while the drive works."""
    buffer = bench.arena.acquire(nbytes)
    assert buffer is not None
    spent: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        slot = bench.store.reserve(nbytes)
        operation = bench.store.write(slot, buffer.address)
        between = time.perf_counter()
        operation.wait()
        again = time.perf_counter()
        bench.store.free(slot)
        spent.append(time.perf_counter() - again + between - start)
    buffer.release()
    return {"submit_us": statistics.median(spent) * 1e6}


def verification(directory: Path, total: int, repeats: int) -> dict[str, Any]:
    """CPU seconds per GB, and throughput, with checksums over without, at 16 MiB."""
    nbytes = 16 * MiB
    # isdigit(1) is 0: an event, of number 1, that has always passed.
    passed = ctypes.cast(ctypes.CDLL(None).isdigit, ctypes.c_void_p).value or 0
    arena = Arena(2 * DEPTH * nbytes + 2 * DEPTH * 4096)
    staged = Bench(directory, "c", total, arena, event_query=passed)
    staged.event = 1
    benches = {"staged": staged, "cpu_tensors": Bench(directory, "c", total, arena, page_offset=64)}
    words = torch.ones(total // 8, dtype=torch.int64)
    speeds: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)
    torch.set_num_threads(1)
    for bench in benches.values():
        bench.prepare(nbytes)
    for repeat in range(repeats):
        for name, bench in benches.items():
            for verify in (False, True)[:: 1 if repeat % 2 else -1]:
                bench.verify = verify
                for direction in ("write", "read"):
                    speed, cpu = bench.run(direction, nbytes)
                    speeds[f"{name}_{direction}_{verify}"].append(speed)
                    cpus[f"{name}_{direction}_{verify}"].append(cpu)
        began = cpu_seconds()
        words.sum()
        cpus["pass"].append((cpu_seconds() - began) / (total / 1e9))
    for bench in benches.values():
        bench.store.close()
    arena.close(force=True)
    figures: dict[str, Any] = {"one_pass_cpu_s_per_gb": statistics.median(cpus["pass"])}
    for name in benches:
        for direction in ("write", "read"):
            key = f"{name}_{direction}"
            with_checksums, without = cpus[f"{key}_True"], cpus[f"{key}_False"]
            differences = [a - b for a, b in zip(with_checksums, without, strict=True)]
            figures[f"{key}_checksum_cpu_s_per_gb"] = statistics.median(differences)
            figures[f"{key}_cpu_s_per_gb"] = statistics.median(without)
            figures[f"{key}_speed_ratio"] = paired_ratio(speeds[f"{key}_True"], speeds[f"{key}_False"])
    return figures


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="on the drive to measure; default: the temporary directory",
    )
    arguments.add_argument("--size", type=int, default=512, help="MiB moved per run")
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--verify", action="store_true", help="measure checksums instead")
    options = arguments.parse_args()
    if options.verify:
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            figures = verification(Path(name), options.size * MiB, options.repeats)
            finish(figures | {"hardware": hardware(Path(name))}, options.json)
        return
    if shutil.which("fio") is None:
        sys.exit(
            "benchmarks.io_engine compares with fio, which is not on the PATH: install it (apt install fio)"
        )
    total = options.size * MiB
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        described = hardware(directory)
        print(described)
        print(
            " ".join(f"{key}={value}" for key, value in FIO_HUGE_PAGES.items()),
            " ".join(fio_command("FILE", total, "write|read")),
        )
        arena = Arena(4 * DEPTH * 16 * MiB)
        bench, python = Bench(directory, "c", total, arena), Bench(directory, "python", total, arena)
        unaligned = Bench(directory, "c", total, arena, page_offset=64)
        with progress("beside fio"):
            figures = beside_fio(bench, unaligned, python, directory / "fio", options.repeats)
        with progress("under a busy main thread"):
            figures |= under_python(bench, options.repeats)
            figures |= under_python(python, max(2, options.repeats // 3), "python_engine_busy")
        figures |= submission(bench)
        for side in (bench, unaligned, python):
            side.store.close()
        arena.close(force=True)
    headline = ("write_ratio_fio", "read_ratio_fio", "busy_write_ratio", "busy_read_ratio", "cpu_s_per_gb")
    ordered = {key: figures[key] for key in (*headline, "python_engine_write_ratio")}
    finish(ordered | figures | {"hardware": described}, options.json)


if __name__ == "__main__":
    main()
