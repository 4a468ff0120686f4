"""Trains every mode, shows progress, and ends with the table, the plot and the verdict on equality."""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from examples.deepspeed_gpt.process import ModeFailed, ModeProcess
from examples.deepspeed_gpt.settings import MODES, TITLES, Settings
from examples.support.plot import MatplotlibMissing, plot_activation_memory
from examples.support.result import RunResult
from examples.support.table import comparison_table
from ssdtrain.config.units import parse_size
from ssdtrain.storage import drive_of, rated_bytes
from ssdtrain.telemetry.lines import write_line
from ssdtrain.text import duration_text, size_text
from ssdtrain.tools.cli.options import given

EQUAL, DIFFERENT, FAILED = 0, 1, 3
"""Exit statuses; 2 is argparse's."""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults, and lines as they are written."""


DESCRIPTION = """\
Train one GPT with DeepSpeed three times with one seed: keeping activations, recomputing every block,
and with SSDTrain; then compare. Exit status 1 if the numbers of keep and SSDTrain differ in any bit."""

EXAMPLES = """examples:
  ssdtrain demo                                    about a minute on 2 idle cores
  ssdtrain demo --steps 20 --data book.txt         longer, and on a text of your own
  ssdtrain demo --directory /local_nvme/spill      activations go to that drive
  ssdtrain demo --modes keep ssdtrain --layers 24  a deeper model, without recomputation
"""


def parser() -> argparse.ArgumentParser:
    shape = Settings()
    made = argparse.ArgumentParser(
        prog="ssdtrain demo", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=_Formatter
    )
    made.add_argument("--steps", type=int, default=shape.steps, help="steps of each run")
    made.add_argument("--data", type=Path, help="any text file; else the Python standard library's sources")
    made.add_argument("--directory", type=Path, help="where activations go; else a new one under --out")
    made.add_argument("--out", type=Path, default=Path("out/demo"), help="results, logs and the plot")
    made.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    made.add_argument("--layers", type=int, default=shape.layers)
    made.add_argument("--hidden", type=int, default=shape.hidden)
    made.add_argument("--heads", type=int, default=shape.heads)
    made.add_argument("--sequence", type=int, default=shape.sequence)
    made.add_argument("--microbatch", type=int, default=shape.microbatch)
    made.add_argument("--dropout", type=float, default=shape.dropout)
    made.add_argument("--zero-stage", type=int, default=shape.zero_stage, choices=(0, 1, 2, 3))
    made.add_argument("--seed", type=int, default=shape.seed)
    made.add_argument(
        "--rated-writes",
        type=given(parse_size),
        help="of the drive, as in 600TB, for its projected life; else its size once a day for five years",
    )
    return made


def main(arguments: list[str] | None = None, console: Console | None = None) -> int:
    made = parser()
    chosen = made.parse_args(arguments)
    console = console or Console()
    with ExitStack() as stack:
        chosen.out.mkdir(parents=True, exist_ok=True)
        directory = chosen.directory or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ssdtrain-", dir=chosen.out)
        )
        Path(directory).mkdir(parents=True, exist_ok=True)
        if drive_of(directory).filesystem == "tmpfs":
            console.print(
                f"{directory} is on tmpfs, which is memory: give --directory on a drive", style="yellow"
            )
        try:
            settings = settings_of(chosen, Path(directory).absolute())
        except ValueError as error:
            made.error(str(error))
        try:
            runs = run_all(chosen.modes, settings, chosen.out, console)
        except ModeFailed as error:
            console.print(f"[bold red]{type(error).__name__}[/]", end=": ")
            console.print(str(error), markup=False, highlight=False)
            return FAILED
        rated = chosen.rated_writes or rated_bytes(drive_of(directory).size)
    return show(runs, chosen.out, rated, console)


def settings_of(chosen: argparse.Namespace, directory: Path) -> Settings:
    named = (
        "steps",
        "layers",
        "hidden",
        "heads",
        "sequence",
        "microbatch",
        "dropout",
        "zero_stage",
        "seed",
        "data",
    )
    settings = Settings(directory=directory, **{name: getattr(chosen, name) for name in named})
    if settings.data is not None and not settings.data.is_file():
        raise ValueError(f"--data {settings.data} is not a file")
    return settings


def run_all(modes: list[str], settings: Settings, out: Path, console: Console) -> list[RunResult]:
    """Starts every mode and has them train one step after another, interleaved. Raises ModeFailed."""
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with ExitStack() as stack:
        progress = Progress(*columns, console=console, disable=not console.is_terminal)
        tasks = {
            mode: progress.add_task(TITLES[mode], total=settings.steps, now="starting") for mode in modes
        }
        stack.enter_context(progress)
        if not console.is_terminal:
            console.print(f"starting {', '.join(TITLES[mode] for mode in modes)}", highlight=False)
        processes = [stack.enter_context(ModeProcess(mode, settings, out / f"{mode}.log")) for mode in modes]
        for _ in range(settings.steps):
            for process in processes:
                show_step(process.mode, process.step(), tasks[process.mode], progress, settings.steps)
        return [process.result() for process in processes]


def show_step(mode: str, line: dict[str, Any], task: TaskID, progress: Progress, steps: int) -> None:
    """A bar on a terminal, elsewhere a line for the first, every fifth and the last step."""
    now = f"loss {line['loss']:.4f}, {duration_text(line['seconds'])}"
    progress.update(task, completed=line["step"], now=now)
    if not progress.console.is_terminal and (line["step"] in (1, steps) or line["step"] % 5 == 0):
        progress.console.print(
            f"step {line['step']:>3} of {steps}  {TITLES[mode]:<10} {now}", highlight=False
        )


def show(runs: list[RunResult], out: Path, rated: float, console: Console) -> int:
    """The table, the files and the verdict; returns the exit status."""
    about = runs[0].about
    title = (
        f"GPT, {about['parameters'] / 1e6:.1f} M parameters, {about['dtype']} on {about['device']}, "
        f"DeepSpeed {about['deepspeed']}, torch {about['torch']}, {size_text(about['text_bytes'])} of text"
    )
    console.print()
    console.print(title, highlight=False)
    console.print(comparison_table(runs, rated_bytes=rated, titles=TITLES))
    results = out / "results.jsonl"
    with results.open("w") as stream:
        for run in runs:
            write_line(stream, run.to_json())
    console.print(f"results: {results}", highlight=False)
    try:
        plot = plot_activation_memory(runs, out / "activation_memory.png", title=title, titles=TITLES)
        console.print(f"activation memory over one step: {plot}", highlight=False)
    except MatplotlibMissing as error:
        console.print(f"no plot: {error}", markup=False, highlight=False)
    return verdict({run.name: run for run in runs}, console)


def verdict(runs: dict[str, RunResult], console: Console) -> int:
    keep = runs.get("keep")
    for name, run in runs.items():
        if keep is None or run is keep:
            continue
        difference = run.differs_from(keep)
        if difference is None:
            console.print(
                f"{TITLES[name]} and keep: all {len(run.losses)} losses and the final weights are equal to the bit.",
                style="green",
                highlight=False,
            )
        else:
            console.print(f"NOT EQUAL: {difference}", style="bold red", highlight=False)
            if name == "ssdtrain":
                return DIFFERENT
    return EQUAL
