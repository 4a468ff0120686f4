"""Error feedback in checkpoints: a file of each rank beside the framework's own.

Residuals, and the bits that `comm.adapt` chose by them, belong to a rank and to the layout it was in. On another layout they are
dropped, with a warning, and feedback begins anew; the count of steps, which decides whether warm-up is over, is kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.comm import Communicator
from ssdtrain.device.runtime import made_current
from ssdtrain.output_files import replace_file

logger = logging.getLogger("ssdtrain")


def save(comm: Communicator, file: Path, layout: Mapping[str, int]) -> None:
    """Write this rank's residuals to `file`, which appears only when it is complete. All ranks of the job call it together, and
    it returns when the files of all of them are complete.

    Args:
        layout: sizes of the parallel dimensions by name.

    Raises:
        OSError: a rank cannot write its file; raised on all ranks, and names that rank.
    """
    error = None
    try:
        _write({"layout": dict(layout), "comm": comm.state_dict()}, file)
    except Exception as failure:  # noqa: BLE001 - raised below, on all ranks
        error = failure
    failed = _failed(_exchange(comm, None if error is None else f"{file}: {error}"))
    if failed is not None:
        rank, text = failed
        raise OSError(
            f"rank {rank} cannot write the error-feedback residuals {text}; the checkpoint is incomplete, save it again"
        ) from error


def _write(state: Mapping[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(file, 0o666) as stream:  # as the files of the framework beside it
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _exchange(comm: Communicator, value: Any) -> list[Any]:
    """`value` of every rank. A collective call of the job."""
    values: list[Any] = [None] * dist.get_world_size()
    with made_current(comm.device):
        dist.all_gather_object(values, value)
    return values


def _failed(texts: Sequence[str | None]) -> tuple[int, str] | None:
    """The first rank with a text, and the text."""
    return next(((rank, text) for rank, text in enumerate(texts) if text is not None), None)


def load(comm: Communicator, file: Path, layout: Mapping[str, int]) -> bool:
    """Take what `save` wrote, if every rank finds its file. All ranks of the job call it together.

    Returns:
        Whether residuals or at least the count of steps were taken; else feedback begins anew, with a warning of rank 0.

    Raises:
        RuntimeError: a rank cannot read its file; raised on all ranks, and names that rank.
    """
    comm.begin_anew()  # what is there is of the run before this load
    state, error = None, None
    if file.is_file():
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as failure:  # noqa: BLE001 - raised below, on all ranks
            error = failure
    steps = None if state is None else state["comm"]["steps"]
    found = _exchange(comm, (steps, None if error is None else f"{file}: {error}"))
    failed = _failed([text for _, text in found])
    if failed is not None:
        rank, text = failed
        raise RuntimeError(
            f"rank {rank} cannot read the error-feedback residuals {text}; without that file they begin anew"
        ) from error
    if state is None or len({steps for steps, _ in found}) > 1:
        missing = [rank for rank, (steps, _) in enumerate(found) if steps is None]
        if comm.feedback is not None and comm.rank == 0:
            logger.warning(
                "comm: %s has no error-feedback residuals of %s: error feedback begins anew",
                file.parent,
                f"ranks {missing}" if missing else f"one step, but of steps {sorted({s for s, _ in found})}",
            )
        return False
    if state["layout"] != dict(layout):
        if comm.rank == 0:
            logger.warning(
                "comm: the error-feedback residuals of %s are of the layout %s, this run has %s: they are dropped",
                file.parent,
                state["layout"],
                dict(layout),
            )
        state["comm"]["feedback"] = None
    comm.load_state_dict(state["comm"])
    return True
