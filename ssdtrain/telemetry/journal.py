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

from ssdtrain.telemetry.lines import write_line
from ssdtrain.telemetry.messages import report
from ssdtrain.telemetry.registry import line
from ssdtrain.telemetry.totals import Interval, RuntimeMetrics

__all__ = ["Journal"]

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

    Attributes:
        file: the open file, or None.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, directory: Path | None, interval: int, rank: int) -> None:
        self._interval = interval if rank == 0 else 0
        self._stream: TextIO | None = None
        self.file: Path | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            file = _free_file(directory.resolve(), rank)
            self._stream = file.open("a")
            self.file = file
            _journals.add(self)
        self._step, self._logged = Interval(), Interval()
        self._load_waits: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._decisions: list[str] = []

    def add(self, values: Mapping[str, float]) -> None:
        """Values of the training script, such as the loss, for the next line of the file. What is not finite is left out."""
        self._given.update({name: value for name, value in values.items() if math.isfinite(value)})

    def step(self, number: int, metrics: RuntimeMetrics, decisions: Sequence[str] = ()) -> None:
        """Record the end of step `number`.

        Args:
            metrics: totals; the file gets differences, the log means per step.
            decisions: see `Feature.decisions`; in the file where they are others than in the step before.
        """
        if self._stream is not None:
            waits = self._worst_waits(metrics)
            record = {"step": number, **self._step.end(metrics), **self._given, "load_waits": waits}
            if decisions and self._decisions != list(decisions):
                record["decisions"] = self._decisions = list(decisions)
            try:
                write_line(self._stream, record)
            except OSError as error:
                self._drop(error)
        self._given = {}
        if self._interval and number % self._interval == 0:
            report(f"step {number} | {line(metrics.declared(), self._logged.end(metrics))}")

    def _worst_waits(self, metrics: RuntimeMetrics) -> list[dict[str, Any]]:
        before, self._load_waits = self._load_waits, metrics.offload.load_waits
        waits = {key: total - before.get(key, 0.0) for key, total in self._load_waits.items()}
        worst = sorted(((seconds, key) for key, seconds in waits.items() if seconds > 0), reverse=True)
        return [{"module": name, "seconds": seconds} for seconds, name in worst[:_WORST]]

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
        file = self.file
        try:
            self._close()
        except OSError as error:
            logger.warning("report.path: %s could not be closed (%s): its end may be missing", file, error)

    def _close(self) -> None:
        stream, self._stream, self.file = self._stream, None, None
        if stream is not None:
            stream.close()


def _free_file(directory: Path, rank: int) -> Path:
    """A file of `rank` that no journal of this process writes."""
    taken = {journal.file for journal in _journals}
    more = (f"rank-{rank}.{number}.jsonl" for number in itertools.count(1))
    files = (directory / name for name in itertools.chain([f"rank-{rank}.jsonl"], more))
    return next(file for file in files if file not in taken)
