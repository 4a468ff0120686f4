"""Error feedback in checkpoints: a file of each rank beside Megatron's own.

Residuals belong to a rank and to the layout it was in. On another layout they are dropped, with a warning, and feedback begins
anew; the count of steps, which decides whether warm-up is over, is kept.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.comm import Communicator
from ssdtrain_megatron import _compat_comm

__all__ = ["load", "save"]

logger = logging.getLogger("ssdtrain")

DIRECTORY = "ssdtrain_comm"


def _file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / DIRECTORY / f"rank_{rank:05d}.pt"


def save(comm: Communicator, checkpoint: Path) -> None:
    """Write this rank's residuals into `checkpoint`, the directory of one iteration.

    Raises:
        OSError: it cannot be written.
    """
    target = _file(checkpoint, comm.rank)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole.
    partial = target.with_suffix(".new")
    torch.save({"layout": _compat_comm.layout(), "comm": comm.state_dict()}, partial)
    os.replace(partial, target)


def load(comm: Communicator, checkpoint: Path) -> bool:
    """Take what `save` wrote, if every rank finds its file. All ranks call it together.

    Returns:
        Whether there was anything to take.
    """
    source = _file(checkpoint, comm.rank)
    state: dict[str, Any] | None = None
    if source.is_file():
        state = torch.load(source, map_location="cpu", weights_only=True)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, state["comm"]["steps"] if state is not None else None)
    if state is None or len(set(found)) > 1:
        missing = [rank for rank, steps in enumerate(found) if steps is None]
        if comm.rank == 0:
            logger.warning(
                "comm: %s has no error-feedback residuals of %s: feedback and its warm-up begin anew",
                checkpoint,
                f"ranks {missing}" if missing else f"one step, but of steps {sorted(set(found))}",
            )
        return False
    layout = _compat_comm.layout()
    if state["layout"] != layout:
        if comm.rank == 0:
            logger.warning(
                "comm: the error-feedback residuals of %s are of the layout %s, this run has %s: they are dropped",
                checkpoint,
                state["layout"],
                layout,
            )
        state["comm"]["feedback"] = None
    comm.load_state_dict(state["comm"])
    return True
