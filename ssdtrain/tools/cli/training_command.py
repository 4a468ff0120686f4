"""`ssdtrain estimate` of the command line of a training script: its flags are read as a job, and what is printed is that job's
plan, as of `ssdtrain plan`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from rich.console import Console

from ssdtrain.config.errors import ConfigError, InvalidValue
from ssdtrain.planner.plans import NoPlan
from ssdtrain.tools.cli.options import add_machine
from ssdtrain.tools.cli.plan import alternatives, show
from ssdtrain.tools.cli.progress import progress
from ssdtrain.tools.whatif.cluster import best_plan, plan_job
from ssdtrain.tools.whatif.explain import figures
from ssdtrain.tools.whatif.gain import gain_of
from ssdtrain.tools.whatif.megatron_command import CommandLine, read

OF_OTHER_MODELS = ("--seq", "--batch", "--blocks", "--state-bytes")
"""Options of the command for a function or a config."""


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0; 1 if no plan fits; 2 for an invalid option or flag."""
    made = argparse.ArgumentParser(
        prog="ssdtrain estimate",
        usage="ssdtrain estimate --gpu GPU [--ssd DRIVES] [OPTION ...] COMMAND LINE OF THE SCRIPT",
        allow_abbrev=False,
        add_help=False,
    )
    add_machine(made, None)
    chosen, words = made.parse_known_args([word for word in arguments if word != "--"])
    for word in words:
        if word.partition("=")[0] in OF_OTHER_MODELS:
            made.error(
                f"{word} is for a function or a config.json; a command line has flags of its own for it"
            )
    machine = {"node": chosen.gpus_per_node, "ssds": chosen.ssd}
    machine |= {"reserve": chosen.reserve, "efficiency": chosen.efficiency}
    try:
        found = read(words, os.environ, chosen.gpu, **machine)
    except (InvalidValue, ConfigError) as error:
        made.error(f"{'the command line ' if isinstance(error, InvalidValue) else ''}{error}")
    return predict(found, chosen.json)


def predict(found: CommandLine, as_json: bool) -> int:
    """Print the plan at the microbatch of the command line, and the largest one that fits. Returns the exit status."""
    job = found.job
    largest = None
    try:
        with progress("planning") as note:
            # Without a number of sequences a step has one microbatch, of any size.
            any_size = job if found.batch_given else replace(job, batch=0)
            _, largest = best_plan(any_size, value=attrgetter("microbatch"))
            plan = plan_job(job, found.microbatch)
            note("what more memory and faster drives would bring")
            others = {} if job.recompute else {"recomputation of blocks": replace(job, recompute=True)}
            better = alternatives(plan, others=others)
            note("what is gained")
            gain = gain_of(job)
    except (InvalidValue, NoPlan) as error:
        what = "the job " if isinstance(error, InvalidValue) else ""
        fits = "" if largest is None else f"; the largest microbatch that fits is {largest}"
        print(f"ssdtrain estimate: {what}{error}{fits}", *notes(found), sep="\n", file=sys.stderr)
        return 1
    largest = max(largest, plan.microbatch)
    if as_json:
        extra = {"alternatives": better, "assumed": found.assumed, "not_counted": found.uncounted}
        extra["gain"] = gain.figures()
        print(json.dumps({**figures(plan, largest), **extra}))
        return 0
    console = Console()
    show(plan, largest, better, {}, gain, console)
    for line in notes(found):
        console.print(line, markup=False, highlight=False)
    return 0


def notes(found: CommandLine) -> list[str]:
    """What the figures rest on, as lines."""
    lines = {"assumed": found.assumed, "not counted": found.uncounted}
    return [f"{name}: {'; '.join(words)}" for name, words in lines.items() if words]
