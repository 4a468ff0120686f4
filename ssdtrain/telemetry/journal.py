"""What each step moved and waited for: a JSON line per step, and a log line now and then."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ssdtrain.telemetry.lines import write_line
from ssdtrain.telemetry.messages import report
from ssdtrain.telemetry.registry import line
from ssdtrain.telemetry.totals import Interval, RuntimeMetrics

__all__ = ["Journal"]

logger = logging.getLogger("ssdtrain")

# How many of the regions that backward waited for most a line names.
_WORST = 3

# Those of this process, whose files are taken while they are open.
_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


class Journal:
    """Writes `rank-N.jsonl` in a directory and logs every `interval` steps.

    Where this process has that file open for another engine it is `rank-N.1.jsonl`, and so on. A file that cannot be written any
    more ends with a warning, and training goes on.

    Args:
        directory: None: no file.
        interval: steps between log lines; 0: none.
        rank: of this process; only rank 0 logs, every rank writes its file.

    Attributes:
        file: that is written; None: none, or no longer.

    Raises:
        OSError: the file cannot be made.
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

    def add(self, values: Mapping[str, float]) -> None:
        """Values of the training script, such as the loss, for the next line of the file. What is not finite is left out."""
        self._given.update({name: value for name, value in values.items() if math.isfinite(value)})

    def step(self, number: int, metrics: RuntimeMetrics) -> None:
        """Step `number` is over. `metrics` are totals; the file's line has what the step added, the log line means per step."""
        if self._stream is not None:
            waits = self._worst_waits(metrics)
            record = {"step": number, **self._step.end(metrics), **self._given, "load_waits": waits}
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
        """The weights have moved when a line is written: an exception here would end a run for the sake of its report."""
        logger.warning(
            "report.path: %s cannot be written (%s) and gets no more lines; training goes on. Free space there, or set "
            "report.path to another directory, and start again to have them",
            self.file,
            error,
        )
        with contextlib.suppress(OSError):  # closing writes again what could not be written
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
