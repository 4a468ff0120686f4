"""`ssdtrain bench`: what this machine's drive, codecs and network do, and a training step of your own model.

ssdtrain bench io /local_nvme
ssdtrain bench codec
ssdtrain bench collective --ranks 2
ssdtrain bench script train.py:build --batch 8 --directory /local_nvme
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from ssdtrain.config import ConfigError, load_config
from ssdtrain.config.codecs import parse_codec
from ssdtrain.config.comm import PRESETS
from ssdtrain.config.units import KiB, MiB
from ssdtrain.text import duration_text, size_text
from ssdtrain.tools.cli import network
from ssdtrain.tools.cli.model_source import factory
from ssdtrain.tools.cli.options import command_parser, given, size, whole
from ssdtrain.tools.cli.progress import progress

if TYPE_CHECKING:
    import torch

BENCH_EXAMPLES = {
    "io": "  ssdtrain bench io /local_nvme --size 4GiB         the drive by SSDTrain's I/O pool, and by fio where it is there",
    "codec": "  ssdtrain bench codec --codec int8 --codec int4    encoding and decoding",
    "collective": """\
  ssdtrain bench collective --ranks 2               compressed all-reduces beside plain ones, in processes of this machine
  torchrun --nnodes 2 ... -m ssdtrain.tools.cli bench collective      the same between nodes""",
    "script": """\
  ssdtrain bench script train.py:build --batch 8    forward and backward with and without SSDTrain, gradients compared

`build(batch)` in train.py returns a model and a function without arguments that runs its forward and returns the loss.""",
}
"""Sections of the help, by part."""


def run(arguments: list[str]) -> int:
    """0; 1 where something cannot be measured; 2 for a wrong option."""
    chosen = parser().parse_args(arguments)
    measures: dict[str, Callable[[argparse.Namespace], int]] = {
        "io": bench_io,
        "codec": bench_codec,
        "collective": bench_collective,
        "script": bench_script,
    }
    try:
        return measures[chosen.part](chosen)
    except (OSError, ValueError, RuntimeError, MemoryError, subprocess.CalledProcessError) as error:
        more = getattr(error, "stderr", None)
        print(f"ssdtrain bench {chosen.part}: {error}{f': {more}' if more else ''}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    examples = "examples:\n" + "\n".join(BENCH_EXAMPLES.values())
    made = command_parser("bench", (__doc__ or "").splitlines()[0], examples)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parts = made.add_subparsers(dest="part", required=True, metavar="|".join(BENCH_EXAMPLES))

    def part(name: str, help: str, description: str) -> argparse.ArgumentParser:
        return parts.add_parser(
            name,
            parents=[common],
            help=help,
            description=description,
            epilog=f"examples:\n{BENCH_EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    io = part("io", "a directory's drive", "The I/O pool beside fio.")
    io.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path("."),
        help="on the drive to measure; default: the working directory",
    )
    io.add_argument("--size", type=size(32 * MiB), default=512 * MiB, help="bytes of a run; default: 512MiB")
    io.add_argument("--repeats", type=whole(), default=5, help="runs each way; default: 5")
    io.add_argument("--engine", choices=["auto", "c", "python"], default="auto", help="default: auto")

    codec = part("codec", "encoding and decoding", "Codecs, and a copy.")
    codec.add_argument(
        "--codec",
        type=codec_spec,
        action="append",
        metavar="SPEC",
        help="such as int8; may be repeated; default: one of each kind",
    )
    codec.add_argument(
        "--size", type=size(KiB), default=64 * MiB, help="bytes of the float32 tensor; default: 64MiB"
    )
    codec.add_argument("--repeats", type=whole(), default=5, help="default: 5")
    codec.add_argument(
        "--device",
        type=device,
        default=None,
        help="cpu, cuda or cuda:N; default: cuda where there is one, else cpu",
    )

    collective = part("collective", "all-reduces", "Compressed all-reduces beside plain ones.")
    collective.add_argument(
        "--ranks", type=whole(), default=2, help="processes to start here, if torchrun did not; default: 2"
    )
    collective.add_argument(
        "--preset",
        choices=PRESETS,
        action="append",
        metavar="NAME",
        help="may be repeated; default: safe, balanced, aggressive",
    )
    collective.add_argument(
        "--size", type=size(KiB), action="append", help="bytes; may be repeated; default: 1MiB, 16MiB"
    )
    collective.add_argument("--repeats", type=whole(), default=5, help="default: 5")

    script = part("script", "your own training step", "Your model with and without SSDTrain.")
    script.add_argument("build", help="module:function or file.py:function; see below")
    script.add_argument("--batch", type=whole(), default=1, help="argument of the function; default: 1")
    script.add_argument(
        "--steps",
        type=whole(),
        default=10,
        help="steps that are measured, after 3 steps of warm-up (8 if a plan is made from them); default: 10",
    )
    where = script.add_mutually_exclusive_group()
    where.add_argument("--directory", type=Path, default=Path("spill"), help="to offload to; default: spill")
    where.add_argument(
        "--config", type=Path, metavar="FILE", help="config to attach, in place of --directory"
    )
    return made


def codec_spec(text: str) -> str:
    """An argparse type: a codec as the config names it."""
    given(parse_codec)(text)
    return text


def device(text: str) -> torch.device:
    """An argparse type: the CPU or a CUDA device of this machine."""
    import torch

    count = torch.cuda.device_count()
    allowed = (
        f"cpu, cuda, or cuda:N with N below {count}" if count else "cpu, since there is no CUDA device here"
    )
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a device; allowed: {allowed}') from None
    if found.type != "cpu" and (found.type != "cuda" or (found.index or 0) >= count):
        raise argparse.ArgumentTypeError(f'"{text}" cannot be measured; allowed: {allowed}')
    return found


def bench_io(chosen: argparse.Namespace) -> int:
    from ssdtrain.tools.bench.io import measure_io

    with progress(f"writing and reading {size_text(chosen.size)}") as note:
        found = measure_io(chosen.directory, chosen.size, chosen.repeats, chosen.engine, note=note)
    title = f"{found['directory']}: {found['file_system']} on {found['drive']}, engine {found['engine']}"
    table = _table(title, "", "SSDTrain", "fio", "ratio", "CPU per GB")
    for direction in ("write", "read"):
        pool, fio = (found[f"{side}_{direction}_bytes_per_second"] for side in ("pool", "fio"))
        ratio = found[f"{direction}_ratio_fio"]
        table.add_row(
            direction,
            f"{size_text(pool)}/s",
            f"{size_text(fio)}/s" if fio else "-",
            f"x{ratio:.2f}" if ratio else "-",
            duration_text(found[f"pool_{direction}_cpu_seconds_per_gb"]),
        )
    notes = (
        [] if found["direct_io"] else ["The file system does not support O_DIRECT: this is the page cache."]
    )
    return finish(
        chosen, found, table, [*notes, *([found["fio"]] if found["write_ratio_fio"] is None else [])]
    )


def bench_codec(chosen: argparse.Namespace) -> int:
    import torch

    from ssdtrain.tools.bench.codec import SPECS, measure_codecs

    place = chosen.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with progress("encoding and decoding") as note:
        found = measure_codecs(chosen.codec or SPECS, chosen.size, chosen.repeats, place, note=note)
    copied = size_text(found["copy_bytes_per_second"])
    title = f"float32, {size_text(found['bytes'])}, {found['device']}; a copy: {copied}/s"
    table = _table(title, "codec", "size", "encode", "decode", "decode and add")
    for name, one in found["codecs"].items():
        rates = [
            f"{size_text(one[f'{way}_bytes_per_second'])}/s" for way in ("encode", "decode", "accumulate")
        ]
        table.add_row(name, f"x{one['ratio']:.3f}", *rates)
    return finish(chosen, found, table, [])


def bench_collective(chosen: argparse.Namespace) -> int:
    if not network.by_torchrun():
        return start_ranks(chosen)
    import torch
    import torch.distributed as dist

    from ssdtrain.ranks import local_rank
    from ssdtrain.tools.bench.collective import BENCH_PRESETS, measure_collectives

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        if dist.get_world_size() == 1:
            raise ValueError("there is one rank: start more, such as torchrun --nproc-per-node 2")
        first = dist.get_rank() == 0
        with progress("all-reduces", first) as note:
            sizes = chosen.size or [MiB, 16 * MiB]
            found = measure_collectives(
                chosen.preset or BENCH_PRESETS, sizes, chosen.repeats, device, note=note
            )
    finally:
        # A group that is still referred to is gone only when the interpreter ends, where gloo's threads may abort the process.
        gc.collect()
        dist.destroy_process_group()
    if not first:
        return 0
    table = Table(title=f"all-reduce of float32 by {found['ranks']} ranks, {found['device']}; slowest rank")
    presets = list(found["wire_ratio"])
    for column in ("size", "plain", *presets):
        table.add_column(column, justify="right", overflow="fold")
    for nbytes, one in found["sizes"].items():
        cells = [f"{duration_text(one[name]['seconds'])} (x{one[name]['speedup']:.2f})" for name in presets]
        table.add_row(size_text(nbytes), duration_text(one["plain"]["seconds"]), *cells)
    table.add_section()
    table.add_row("bytes sent", "x1", *(f"x{found['wire_ratio'][name]:.3f}" for name in presets))
    return finish(chosen, found, table, ["In brackets: how many times as fast as the plain one."])


def start_ranks(chosen: argparse.Namespace) -> int:
    """The same command in several processes of this machine."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={chosen.ranks}",
    ]
    command += ["-m", "ssdtrain.tools.cli", "bench", "collective", f"--repeats={chosen.repeats}"]
    command += [f"--preset={name}" for name in chosen.preset or ()]
    command += [f"--size={size}" for size in chosen.size or ()] + (["--json"] if chosen.json else [])
    return subprocess.run(command, check=False).returncode


def bench_script(chosen: argparse.Namespace) -> int:
    from ssdtrain.tools.bench.script import measure_script

    config = chosen.config or {"offload": {"directories": str(chosen.directory)}, "report": {"interval": 0}}
    try:
        loaded = load_config(config)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not loaded.active:
        raise ValueError(
            f'{chosen.config} switches nothing on; allowed: "enabled" and a section such as offload'
        )
    try:
        build = factory(chosen.build)
    except ValueError as error:
        raise ValueError(f"the model {error}") from error
    with progress("training") as note:
        try:
            found = measure_script(build, chosen.batch, chosen.steps, loaded, note=note)
        except ConfigError:
            raise
        except ValueError as error:
            raise ValueError(f"{chosen.build} {error}") from error
    title = f"{chosen.build}, batch {found['batch']}, {found['steps']} steps in turn"
    table = _table(title, "", "without", "with SSDTrain", "ratio")
    low, high = found["step_ratio_interval"]
    table.add_row(
        "forward and backward",
        duration_text(found["plain_seconds"]),
        duration_text(found["ssdtrain_seconds"]),
        f"x{found['step_ratio']:.3f} ({low:.3f} to {high:.3f})",
    )
    peaks = found["plain_activation_peak_bytes"], found["activation_peak_bytes"]
    table.add_row(
        "activation peak", *map(size_text, peaks), f"x{peaks[1] / peaks[0]:.2f}" if peaks[0] else ""
    )
    table.add_row("offloaded a step", "", size_text(found["offloaded_bytes_per_step"]), "")
    table.add_row("waited a step", "", duration_text(found["wait_seconds_per_step"]), "")
    table.add_row("gradients", "", "equal, bit for bit" if found["gradients_equal"] else "differ", "")
    return finish(chosen, found, table, [])


def _table(title: str, first: str, *others: str) -> Table:
    """Return a table of words in the first column and figures in the others."""
    return Table(first, *(Column(other, justify="right") for other in others), title=title)


def finish(chosen: argparse.Namespace, found: dict[str, Any], table: Table, notes: list[str]) -> int:
    """Show the figures."""
    if chosen.json:
        print(json.dumps(found))
        return 0
    console = Console()
    console.print(table)
    for text in notes:
        console.print(text)
    return 0
