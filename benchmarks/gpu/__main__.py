"""SSDTrain's table on one GPU: `python -m benchmarks.gpu --json --directory /nvme`.

GPT, BERT and T5 of (hidden, layers) = (8192, 4), (12288, 3), (16384, 2) (arXiv 2408.10013), and GPTs of 32 layers of 4096 at
4k and 16k tokens, in bf16. Each is trained in every way of `measure.WAYS` in this process, with the same seed: activation peak
and step time against keeping everything, equality of the losses, and the largest microbatch that fits with its throughput.
Rows that do not fit, that failed, that the drive (measured first) is too slow for, or that `--seconds` left no time for, are
named as such. With `--rows` what was measured is kept in a file: a further call on the same device with the same sources goes
on with what is missing; status 75 says that something is.

`--device cpu --dry-run` runs the same code with tiny models and no memory figures: it shows that the script works, nothing else.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser
from benchmarks.gpu.attempts import AttemptFailed, Attempts, DriveTooSlow, TimeIsOver
from benchmarks.gpu.measure import WAYS, Geometry, be_deterministic
from benchmarks.gpu.models import KINDS
from benchmarks.gpu.sources import MEASURED, digest
from ssdtrain.text import size_text
from ssdtrain.tools.cli.doctor import measure as measure_drive

GiB = 1 << 30
PAPER = ((8192, 4), (12288, 3), (16384, 2))
LARGEST_TRIED = 64
"""Sequences of a microbatch."""
STEPS, FEW_STEPS = 6, 3
"""Of a row, and of each microbatch that is tried."""
SOURCES = digest(MEASURED)
"""Read before anything is measured."""
DRIVE_SAMPLE = 256 << 20
"""Bytes that the drive is measured with before anything is begun."""
MORE = 75
"""Exit status: call it again."""


def geometries(dry: bool) -> Iterator[Geometry]:
    """In the order in which they are run: what matters most comes first, should the time end."""
    if dry:
        for kind in KINDS:
            yield Geometry(kind, 64, 2, 32, 2, vocabulary=128)
        return
    for hidden, layers in PAPER:
        for kind in KINDS:
            yield Geometry(kind, hidden, layers, 1024, 16)
    yield Geometry("gpt", 4096, 32, 4096, 1)
    yield Geometry("gpt", 4096, 32, 16384, 1)


def row_of(attempts: Attempts, geometry: Geometry, **options: Any) -> dict[str, Any]:
    """All ways of one geometry, relative to keeping. "fits" is false where one does not fit, and null where it failed, or where
    "too_slow" says that the drive is."""
    ways: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        try:
            found = attempts.measure(geometry, way, steps=STEPS, **options)
        except AttemptFailed as error:
            ways[way] = {"fits": None, "error": str(error)}
            continue
        except DriveTooSlow as error:
            ways[way] = {"fits": None, "too_slow": str(error)}
            continue
        ways[way] = {"fits": False} if found is None else {"fits": True, **dataclasses.asdict(found)}
    keep = ways["keep"]
    for found_way in ways.values():
        if found_way["fits"] and keep["fits"]:
            steps = min(len(found_way["losses"]), len(keep["losses"]))
            found_way["loss_equal"] = found_way["losses"][:steps] == keep["losses"][:steps]
            found_way["step_time_ratio"] = found_way["step_seconds"] / keep["step_seconds"]
            if keep["peak_bytes"]:
                found_way["peak_ratio"] = found_way["peak_bytes"] / keep["peak_bytes"]
                found_way["reserved_ratio"] = found_way["reserved_bytes"] / keep["reserved_bytes"]
    return {"geometry": geometry.name, "ways": ways}


def largest_microbatch(
    attempts: Attempts, geometry: Geometry, way: str, limit: int, **options: Any
) -> dict[str, Any]:
    """The largest of 1, 2, 4, ... that fits, and its tokens per second; "error" alone where one failed instead. "at_least": none
    was too large, up to `limit` or to what the drive is fast enough for."""
    best: dict[str, Any] = {"microbatch": 0, "tokens_per_second": 0.0, "at_least": False}
    microbatch = 1
    while microbatch <= limit:
        tried = dataclasses.replace(geometry, microbatch=microbatch)
        try:
            found = attempts.measure(tried, way, **options, steps=FEW_STEPS)
        except AttemptFailed as error:
            return {"error": f"{tried.name}: {error}"}
        except DriveTooSlow:
            return best | {"at_least": True}
        if found is None:
            break
        best = {
            "microbatch": microbatch,
            "tokens_per_second": microbatch * geometry.sequence / found.step_seconds,
            "at_least": 2 * microbatch > limit,
        }
        microbatch *= 2
    return best


def markdown(result: dict[str, Any]) -> str:
    """docs/results/gpu.md."""
    lines = [
        "# Measured on a GPU",
        "",
        f"{result['date']}, {result['hardware']}, torch {result['torch']}: `python -m benchmarks.gpu`.",
        f"Digest of the sources: {result['sources']}.",
        "",
        "Activation peak (highest allocation beyond parameters and gradients), the same of what the allocator had reserved, and",
        "step time, each relative to keeping everything in the same run; bf16. A dash: it does not fit, or the device does not",
        "say.",
        "",
    ]
    if result["dry_run"]:
        lines += ["**A dry run on tiny models: its figures mean nothing.**", ""]
    lines += [
        "| model | way | peak | of keep | reserved | of keep | step | of keep | loss equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["rows"]:
        for way, found in row["ways"].items():
            cells = [row["geometry"], way]
            if found["fits"]:
                times = found.get("step_time_ratio")
                for kind in ("peak", "reserved"):
                    nbytes, ratio = found[f"{kind}_bytes"], found.get(f"{kind}_ratio")
                    cells += [size_text(nbytes) if nbytes else "-", f"x{ratio:.2f}" if ratio else "-"]
                cells += [
                    f"{found['step_seconds'] * 1e3:.1f} ms",
                    f"x{times:.2f}" if times else "-",
                    {True: "yes", False: "NO", None: "-"}[found.get("loss_equal")],
                ]
            else:
                failed = "drive too slow" if "too_slow" in found else "failed"
                cells += [failed if found["fits"] is None else "-", *["-"] * 6]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Largest microbatch of powers of two, and its throughput:", ""]
    lines += ["| model | way | microbatch | tokens/s |", "|---|---|---|---|"]
    for row in result["largest"]:
        for way, found in row["ways"].items():
            cells = ["failed", "-"]
            if "error" not in found:
                size = f"{'at least ' if found['at_least'] else ''}{found['microbatch']}"
                cells = [size, f"{found['tokens_per_second']:.0f}"]
            lines.append("| " + " | ".join([row["geometry"], way, *cells]) + " |")
    if result["left_out"]:
        lines += ["", f"Not run, the time was over: {', '.join(result['left_out'])}."]
    if result["too_slow"]:
        lines += ["", "Not run, the drive is too slow:", "", *(f"- {why}" for why in result["too_slow"])]
    if result["errors"]:
        lines += ["", "**Failed**:", "", *(f"- {error}" for error in result["errors"])]
    return "\n".join(lines) + "\n"


def hardware_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"


def run(
    device: torch.device, dry: bool, directory: str, host_bytes: int, attempts: Attempts
) -> dict[str, Any]:
    """All rows that the time allows."""
    options: dict[str, Any] = {"device": device, "directory": directory, "host_bytes": host_bytes}
    rows, largest, left_out = [], [], []
    for geometry in geometries(dry):
        try:
            rows.append(row_of(attempts, geometry, **options))
        except TimeIsOver:
            left_out.append(geometry.name)
            continue
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    first = next(geometries(dry))
    ways = ("keep", "recompute", "host", "ssd", "ssd_auto")
    limit = 2 if dry else LARGEST_TRIED
    try:
        found = {way: largest_microbatch(attempts, first, way, limit, **options) for way in ways}
        largest.append({"geometry": first.name.partition(",")[0], "ways": found})
    except TimeIsOver:
        left_out.append("the largest microbatch")
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware_of(device),
        "torch": torch.__version__,
        "sources": SOURCES,
        "dry_run": dry,
        "rows": rows,
        "largest": largest,
        "left_out": left_out,
        "too_slow": attempts.too_slow,
        "errors": attempts.errors,
    }


def main() -> int:
    arguments = parser("Train GPT, BERT and T5 on a GPU, kept, recomputed and offloaded")
    arguments.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments.add_argument("--dry-run", action="store_true", help="tiny models, to try the script")
    arguments.add_argument("--directory", help="on the drive; by default a temporary one")
    arguments.add_argument("--host-gib", type=float, default=48.0, help="host tier at most, GiB")
    arguments.add_argument("--seconds", type=float, default=480.0, help="end in so many")
    arguments.add_argument(
        "--rows", type=Path, help="keep what is measured there, and go on with what is missing"
    )
    arguments.add_argument("--write", type=Path, help="write the table there, as docs/results/gpu.md")
    chosen = arguments.parse_args()
    if chosen.device == "cpu" and not chosen.dry_run:
        arguments.error("--device cpu is for --dry-run: models of this size are not trained on a CPU")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        arguments.error("no CUDA device here; --device cpu --dry-run tries the script")
    be_deterministic()  # nothing is filled: that would be timed
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = torch.device("cpu") if chosen.device == "cpu" else torch.device("cuda", 0)
    host_bytes = int((0.25 if chosen.dry_run else chosen.host_gib) * GiB)
    torch_version = f"torch {torch.__version__}"
    setting = (hardware_of(device), torch_version, SOURCES, str(chosen.directory), str(host_bytes))
    with tempfile.TemporaryDirectory(prefix="ssdtrain-gpu-", dir=chosen.directory) as directory:
        written, read = measure_drive(Path(directory), DRIVE_SAMPLE)
        print(f"the drive writes {size_text(written)}/s and reads {size_text(read)}/s", file=sys.stderr)
        attempts = Attempts(chosen.rows, chosen.seconds, setting, (written, read))
        result = run(device, chosen.dry_run, directory, host_bytes, attempts)
        result |= {"drive_write_bytes_per_second": written, "drive_read_bytes_per_second": read}
    text = markdown(result)
    print(text)
    if chosen.write is not None:
        chosen.write.write_text(text)
    unequal = [
        f"{row['geometry']}, {way}"
        for row in result["rows"]
        for way, found in row["ways"].items()
        if found.get("loss_equal") is False
    ]
    if unequal:
        print(f"losses differ from keeping: {'; '.join(unequal)}", file=sys.stderr)
    if chosen.json:
        print(json.dumps(result))
    if result["left_out"] and chosen.rows is not None:
        return MORE
    return 1 if unequal or result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
