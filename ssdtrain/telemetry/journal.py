"""Metrics of each step: a JSON line per step, and a log line every `interval` steps."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from ssdtrain import messages
from ssdtrain.comm import Communicator
from ssdtrain.config import ConfigError, ReportConfig
from ssdtrain.features import Feature, Placement
from ssdtrain.metrics import line
from ssdtrain.offload.checks.module_tally import ModuleTally
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.output_files import open_to_append
from ssdtrain.telemetry.lines import write_line
from ssdtrain.telemetry.module_bytes import ModuleBytes
from ssdtrain.telemetry.tensorboard import TensorBoard
from ssdtrain.telemetry.totals import Interval, RuntimeMetrics
from ssdtrain.telemetry.trace import StepTrace

logger = logging.getLogger("ssdtrain")

# Modules with the longest load waits that a line names.
_WORST = 3

# Open journals of this process, whose files must not be opened again.
_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


class Journal:
    """Writes `rank-N.jsonl` in a directory and logs every `interval` steps.

    If this process has that file open already, `rank-N.1.jsonl` is used, and so on. If a file can no longer be written, a warning
    is logged and training continues.

    Args:
        directory: of the file; None: no file.
        interval: steps between log lines; 0: no log lines.
        rank: of this process; only rank 0 logs, every rank writes its file.
        board: also gets the values; closed with the journal.

    Attributes:
        file: the open file, or None.
        modules: bytes by module of chosen steps, and names of modules for waits; None: unknown.
        reserved: names that values of the training script cannot have.

    Raises:
        OSError: the file cannot be created, or something else is in its place (`ssdtrain.output_files`).
    """

    def __init__(
        self, directory: Path | None, interval: int, rank: int, board: TensorBoard | None = None
    ) -> None:
        self._board = board
        self.modules: ModuleBytes | None = None
        self.reserved = {"step", "late", "load_waits", "modules", "decisions"}
        self._interval = interval if rank == 0 else 0
        self._stream: TextIO | None = None
        self.file: Path | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            file = _free_file(directory.resolve(), rank)
            self._stream = open_to_append(file)
            self.file = file
            _journals.add(self)
        self._step, self._logged = Interval(), Interval()
        self._load_waits: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._ended = 0
        self._decisions: list[str] = []

    @classmethod
    def open(cls, report: ReportConfig, place: Placement, *, logs: bool) -> Journal | None:
        """Open the journal that `report` asks for on this rank; None: nothing is to be written.

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
            return cls(path, interval, place.rank, board)
        except OSError as error:
            if board is not None:
                board.close()
            why = f"cannot be written ({Path(error.filename or str(path)).name} {error.strerror})"
            allowed = "a directory of this user's own"
            raise ConfigError.of("ssdtrain.report.path", str(path), why, allowed) from error

    def recorders(
        self, report: ReportConfig, place: Placement, engine: OffloadEngine | None, comm: Communicator | None
    ) -> list[Feature]:
        """Make the features that record for its file."""
        found: list[Feature] = []
        if self.file is not None and report.trace:
            file = self.file.with_name(f"trace-{self.file.stem}.json")
            found.append(StepTrace(report.trace, file, place, engine, comm))
        if self.file is not None and engine is not None:
            self.modules = ModuleBytes(engine)
            found.append(self.modules)
        return found

    @property
    def records(self) -> bool:
        """Whether it writes a file or event files, and not only the log."""
        return self._stream is not None or self._board is not None

    def add(self, values: Mapping[str, float], *, late: bool = False) -> None:
        """Take values of the training script, such as the loss, for the next line of the file. What is not finite is left out.

        Args:
            late: they are of the step that ended last, and get a line of their own with its number.

        Raises:
            ValueError: a name is in `reserved`, or a value is not a number.
        """
        given: dict[str, float] = {}
        for name, value in values.items():
            if name in self.reserved:
                raise ValueError(
                    f"log_values: {name} is a name of SSDTrain's own values; give yours another name"
                )
            try:
                number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"log_values: {name} is not a number ({error}); give one, such as loss.item()"
                ) from error
            if math.isfinite(number):
                given[name] = number
        if not late or not self._ended:
            self._given |= given
        elif given:
            self._write({"step": self._ended, "late": True, **given})
            if (board := self._board) is not None:
                board.values(self._ended, given)

    def step(self, number: int, metrics: RuntimeMetrics, decisions: Sequence[str] = ()) -> None:
        """Record the end of step `number`.

        Args:
            metrics: totals; the file gets differences, the log means per step.
            decisions: see `Feature.decisions`; in the file where they are others than in the step before.
        """
        tally = self.modules.take() if self.modules is not None else None
        given, self._given = self._given, {}
        self._ended = number
        if self._stream is not None:
            waits = self._waits(metrics)
            record = {"step": number, **self._step.end(metrics), **given, "load_waits": _longest(waits)}
            if tally is not None:
                record["modules"] = _by_module(tally, waits)
            if decisions and self._decisions != list(decisions):
                record["decisions"] = self._decisions = list(decisions)
            self._write(record)
        if (board := self._board) is not None:
            board.step(number, metrics, given)
        if self._interval and number % self._interval == 0:
            messages.report(f"step {number} | {line(metrics.declared(), self._logged.end(metrics))}")

    def _write(self, record: dict[str, Any]) -> None:
        stream = self._stream  # another thread may close it meanwhile
        if stream is None:
            return
        try:
            write_line(stream, record)
        except OSError as error:
            self._drop(error)
        except ValueError:
            if not stream.closed:
                raise

    def _waits(self, metrics: RuntimeMetrics) -> dict[str, float]:
        """Seconds that backward waited in this step, by module, or by the place of a region whose module is not known."""
        before, self._load_waits = self._load_waits, metrics.offload.load_waits
        names = self.modules.names if self.modules is not None else {}
        waits: dict[str, float] = {}
        for key, total in self._load_waits.items():
            if (seconds := total - before.get(key, 0.0)) > 0:
                name = names.get(key) or key
                waits[name] = waits.get(name, 0.0) + seconds
        return waits

    def _drop(self, error: OSError) -> None:
        """Stop writing the file. An exception would end a training run because of its report."""
        logger.warning(
            "report.path: %s cannot be written (%s); no more lines are recorded, training continues. To record them, free space "
            "or set report.path to another directory, and restart",
            self.file,
            error,
        )
        with contextlib.suppress(OSError):  # closing flushes the buffer, which may fail again
            self._close()

    def close(self) -> None:
        """Idempotent."""
        board, self._board = self._board, None
        file = self.file
        try:
            self._close()
        except OSError as error:
            logger.warning("report.path: %s could not be closed (%s): its end may be missing", file, error)
        finally:
            if board is not None:
                board.close()

    def _close(self) -> None:
        stream, self._stream, self.file = self._stream, None, None
        if stream is not None:
            stream.close()


def _longest(waits: Mapping[str, float]) -> list[dict[str, Any]]:
    found = sorted(((seconds, name) for name, seconds in waits.items()), reverse=True)
    return [{"module": name, "seconds": seconds} for seconds, name in found[:_WORST]]


def _by_module(tally: ModuleTally, waits: Mapping[str, float]) -> list[dict[str, Any]]:
    """Every module that saved a tensor, in order of its name."""
    return [
        {
            "module": name,
            "offloaded_bytes": tally.offloaded_bytes.get(name, 0),
            "kept_bytes": tally.kept_bytes.get(name, 0),
            "load_wait_seconds": waits.get(name, 0.0),
        }
        for name in sorted({*tally.offloaded_bytes, *tally.kept_bytes})
    ]


def _free_file(directory: Path, rank: int) -> Path:
    """A file of `rank` that no journal of this process writes."""
    taken = {journal.file for journal in _journals}
    more = (f"rank-{rank}.{number}.jsonl" for number in itertools.count(1))
    files = (directory / name for name in itertools.chain([f"rank-{rank}.jsonl"], more))
    return next(file for file in files if file not in taken)
