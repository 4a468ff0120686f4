"""Runs a training script with the plugin installed.

`python -m ssdtrain_ds train.py ARGS`, `torchrun -m ssdtrain_ds train.py ARGS`, `deepspeed --module ssdtrain_ds train.py ARGS`;
`-m package.module` in the place of the script runs a module. DeepSpeed's launcher puts `--local_rank=N` in front of all
arguments; the script gets it in front of its own, where it would have been without this.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import MutableMapping
from typing import NamedTuple

USAGE = "usage: python -m ssdtrain_ds [-m] SCRIPT [ARGUMENTS ...]"


HELP = """\
Runs a training script with SSDTrain installed in DeepSpeed: the "ssdtrain" block of its DeepSpeed config is read.

  python -m ssdtrain_ds train.py ...                          one process
  torchrun --nproc_per_node 8 -m ssdtrain_ds train.py ...     several
  deepspeed --module ssdtrain_ds train.py ...

With -m SCRIPT is the name of a module. All ARGUMENTS are the script's."""

# What launchers give each process they start: torchrun and deepspeed, and MPI's and Slurm's, which DeepSpeed asks mpi4py about.
_OF_A_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_RANK",
    "MPI_LOCALRANKID",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "SLURM_PROCID",
    "AZUREML_EXPERIMENT_ID",
    "SM_CURRENT_HOST",
)


class UsageError(ValueError):
    """The command line names no script."""


class Command(NamedTuple):
    """What to run: a file, or with `module` a module's name; and its arguments without its own name."""

    name: str
    module: bool
    arguments: list[str]


def parse(arguments: list[str]) -> Command:
    """The command in `arguments`, those after `-m ssdtrain_ds`.

    Raises:
        UsageError: there is no script, or an option that is not known stands in front of it.
    """
    injected: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("--local"):
        option = rest.pop(0)
        if option.split("=")[0] not in ("--local_rank", "--local-rank"):
            raise UsageError(f"{option} is not an option of ssdtrain_ds\n{USAGE}")
        injected.append(option)
        if "=" not in option:
            if not rest:
                raise UsageError(f"{option} has no value\n{USAGE}")
            injected.append(rest.pop(0))
    module = bool(rest) and rest[0] == "-m"
    if module:
        rest.pop(0)
    if not rest:
        raise UsageError(f"there is no script to run\n{USAGE}")
    if rest[0].startswith("-"):
        raise UsageError(f"{rest[0]} is not an option of ssdtrain_ds\n{USAGE}")
    return Command(rest[0], module, injected + rest[1:])


def set_single_process(environment: MutableMapping[str, str]) -> None:
    """Set the variables of a single process in `environment`: without a launcher DeepSpeed would ask mpi4py."""
    if any(name in environment for name in _OF_A_LAUNCHER):
        return
    environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in environment:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            environment["MASTER_PORT"] = str(probe.getsockname()[1])


def main(arguments: list[str] | None = None) -> None:
    """Install the plugin and run the script as `__main__`, as `python SCRIPT` would have."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{HELP}")
        return
    try:
        command = parse(given)
    except UsageError as error:
        sys.exit(str(error))
    if not command.module and not os.path.exists(command.name):
        sys.exit(f"ssdtrain_ds: there is no file {command.name}")

    set_single_process(os.environ)

    import ssdtrain_ds

    ssdtrain_ds.install()
    sys.argv = [command.name, *command.arguments]
    if command.module:
        runpy.run_module(command.name, run_name="__main__", alter_sys=True)
    else:
        # What `python SCRIPT` puts first; `python -m` had put the working directory there, which stays reachable.
        sys.path.insert(0, os.path.dirname(os.path.abspath(command.name)))
        runpy.run_path(command.name, run_name="__main__")
