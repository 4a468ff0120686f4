"""What `report` asks for: a journal, and the features that record for it."""

from __future__ import annotations

from pathlib import Path

from ssdtrain.comm import Communicator
from ssdtrain.config import ConfigError, ConfigIssue, ReportConfig
from ssdtrain.features import Feature, Placement
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.telemetry.journal import Journal
from ssdtrain.telemetry.module_bytes import ModuleBytes
from ssdtrain.telemetry.step_watch import StepWatch
from ssdtrain.telemetry.tensorboard import TensorBoard
from ssdtrain.telemetry.trace import StepTrace

__all__ = ["open_journal", "recorders"]


def open_journal(report: ReportConfig, place: Placement, *, logs: bool) -> Journal | None:
    """The journal of this rank; None: nothing is to be written.

    Args:
        logs: write log lines every `report.interval` steps.

    Raises:
        ConfigError: the journal cannot be created, or something else is in its place.
        OSError: files of TensorBoard cannot be created.
    """
    path = report.expand(rank=place.rank, local_rank=place.local_rank)
    board_path = report.expand_tensorboard(rank=place.rank, local_rank=place.local_rank)
    interval = report.interval if logs else 0
    if not interval and path is None and board_path is None:
        return None
    board = None if board_path is None else TensorBoard(board_path, report.interval)
    try:
        return Journal(path, interval, place.rank, board)
    except OSError as error:
        if board is not None:
            board.close()
        why = f"cannot be written ({Path(error.filename or str(path)).name} {error.strerror})"
        allowed = "a directory of this user's own"
        raise ConfigError([ConfigIssue("ssdtrain.report.path", str(path), why, allowed)]) from error


def recorders(
    report: ReportConfig,
    place: Placement,
    journal: Journal | None,
    engine: OffloadEngine | None,
    comm: Communicator | None,
) -> list[Feature]:
    """The features that record for a file of `journal`. They come before features that plan from the same records, which take
    them."""
    found: list[Feature] = []
    if engine is not None and not (report.path is None and report.tensorboard is None):
        found.append(StepWatch())
    if journal is None or journal.file is None:
        return found
    if report.trace:
        file = journal.file.with_name(f"trace-{journal.file.stem}.json")
        found.append(StepTrace(report.trace, file, place, engine, comm))
    if engine is not None:
        journal.modules = ModuleBytes(engine)
        found.append(journal.modules)
    return found
