"""`ssdtrain COMMAND ...`: dispatches to a command."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

from ssdtrain import __version__

COMMANDS = {
    "demo": "train a GPT with DeepSpeed, keeping, recomputing and offloading its activations, and compare",
    "doctor": "what is installed, what was built, and what the drives behind directories can do",
    "bench": "measure this machine's drive, codecs and network, and a training step of your own model",
    "estimate": "what your own model takes on a GPU, counted without one",
    "report": "what a run did, as one HTML file made from the journals of report.path",
    "plan": "predict microbatch, step time, SSD bandwidth and life of a model on GPUs and drives that need not be here",
}
"""Each is a module of this package with `run(arguments) -> exit status`."""

INTERRUPTED = 130
"""Exit status that shells have for a program that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of the command; 2 if it is missing or unknown, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        complete()
    if given[:1] == ["--version"]:
        print(__version__)
        return 0
    if given[:1] in (["-h"], ["--help"]):
        print(usage())
        return 0
    if not given or given[0] not in COMMANDS:
        why = f"no command {given[0]!r}" if given else "which command?"
        print(f"ssdtrain: {why}\n{usage()}", file=sys.stderr)
        return 2
    try:
        run: Callable[[list[str]], int] = import_module(f"ssdtrain.tools.cli.{given[0]}").run
        status = run(given[1:])
        if sys.stdout is not None:  # which is closed
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # of `ssdtrain ... | head`; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"ssdtrain {given[0]}: {error}", file=sys.stderr)
        return 1
    return status


def complete() -> None:
    """Answer a shell that has run `eval "$(register-python-argcomplete ssdtrain)"`, and end."""
    try:
        argcomplete = import_module("argcomplete")
    except ImportError:
        return
    argcomplete.autocomplete(whole_parser())


def whole_parser() -> argparse.ArgumentParser:
    """All commands and their options in one parser."""

    def own(
        *, prog: str, made: Callable[[], argparse.ArgumentParser], **_: object
    ) -> argparse.ArgumentParser:
        return made()

    whole = argparse.ArgumentParser(prog="ssdtrain", description=usage())
    commands = whole.add_subparsers(parser_class=cast(Any, own))
    for name, summary in COMMANDS.items():
        module = import_module(f"ssdtrain.tools.cli.{name}")
        commands.add_parser(name, help=summary, made=module.parser)
    return whole


def usage() -> str:
    lines = ["usage: ssdtrain COMMAND ..., with --help after a command for its options", ""]
    lines += [f"  {name:<9} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(lines)
