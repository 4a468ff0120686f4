"""The place of this process in its job: torch.distributed's rank, and the launchers' variables for its place on the node."""

from __future__ import annotations

import os
import re

# torchrun, srun, Open MPI's mpirun, MPICH's and Intel's.
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)


def global_rank() -> int:
    """torch.distributed's rank; 0 where it is not initialised."""
    import torch.distributed as distributed  # the config, which asks for the local size, needs no torch

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def on_this_rank() -> str:
    """Such as " on rank 3", for an error that other ranks may not have; "" where this process is the only one."""
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return ""
    return f" on rank {distributed.get_rank()}"


def local_rank() -> int:
    """Within the node; 0 without a launcher."""
    return _first(_LOCAL_RANK, 0)


def local_world_size() -> int:
    """Ranks on this node, which share its drives and memory; 1 without a launcher. Of nodes that differ, the most on any."""
    tasks = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_TASKS_PER_NODE", ""))  # "8(x2),4"
    return max(1, _first(_LOCAL_SIZE, max(map(int, tasks), default=1)))


def _first(names: tuple[str, ...], otherwise: int) -> int:
    for name in names:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return otherwise
