"""`ssdtrain report`: what a run did, as one HTML file made from the journals of `report.path`."""

import argparse
import sys
from pathlib import Path

from ssdtrain.output_files import replace_file
from ssdtrain.tools.cli.options import command_parser
from ssdtrain.tools.cli.progress import progress
from ssdtrain.tools.report.exports import merge_traces, write_prometheus
from ssdtrain.tools.report.figures import compared
from ssdtrain.tools.report.page import page
from ssdtrain.tools.report.run import JournaledRun

_EXAMPLES = """examples:
  ssdtrain report out/report                            writes out/report/report.html
  ssdtrain report out/report --against out/baseline     two runs side by side
  ssdtrain report out/report --trace                    steps of report.trace, all ranks, for ui.perfetto.dev
  ssdtrain report out/report --prometheus /var/lib/node_exporter/ssdtrain.prom
"""


def run(arguments: list[str]) -> int:
    """Returns the exit status: 0; 1 if there is nothing to report or a file cannot be written."""
    made = parser()
    chosen = made.parse_args(arguments)
    for other in ("prometheus", "trace"):
        for option, what in (("output", "the file of"), ("against", "for")):
            if getattr(chosen, other) is not None and getattr(chosen, option) is not None:
                made.error(f"--{option} is {what} the page, which --{other} does not write")
    try:
        return _write(chosen)
    except (OSError, ValueError) as error:
        denied = isinstance(error, PermissionError)
        remedy = ": give a file that this user can write (--help)" if denied else ""
        print(f"ssdtrain report: {error}{remedy}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    parser = command_parser("report", __doc__, _EXAMPLES)
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="the directory of report.path; journals in folders below it are read too",
    )
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="the directory of a second run, to compare with"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where the page is written; by default report.html in DIR",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--prometheus", type=Path, metavar="FILE", help="write Prometheus text there, and no page"
    )
    way.add_argument(
        "--trace",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="put the traces of all ranks (report.trace) into one file for ui.perfetto.dev, and write no page; by default "
        "trace.json in DIR",
    )
    return parser


def _write(chosen: argparse.Namespace) -> int:
    for directory in filter(None, (chosen.directory, chosen.against)):
        if not directory.is_dir():
            why = "is not a directory" if directory.exists() else "does not exist"
            raise ValueError(f"{directory} {why}: give the directory of report.path")
    if chosen.trace is not None:
        output = chosen.directory / "trace.json" if chosen.trace == Path() else chosen.trace
        with progress("reading traces"):
            ranks = merge_traces(chosen.directory, output)
        print(
            f"{output} ({len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'}): open it at https://ui.perfetto.dev"
        )
        return 0
    with progress(f"reading {chosen.directory}"):
        found = JournaledRun.read(chosen.directory)
    if chosen.prometheus is not None:
        write_prometheus(found, chosen.prometheus)
        print(chosen.prometheus)
        return 0
    output = chosen.output or chosen.directory / "report.html"
    with progress(f"writing {output}"):
        against = JournaledRun.read(chosen.against) if chosen.against is not None else None
        with replace_file(output) as stream:
            stream.write(page(found, against).encode(errors="backslashreplace"))
    if against is not None:
        print("\n".join(compared(found, against)))
    print(output)
    return 0
