"""`report.tensorboard`: the metrics of each rank as scalars of TensorBoard."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssdtrain.telemetry.totals import Interval, RuntimeMetrics

logger = logging.getLogger("ssdtrain")

# Of this process: whose directories must not be written by another one.
_boards: weakref.WeakSet[TensorBoard] = weakref.WeakSet()


class TensorBoard:
    """Writes metrics as `ssdtrain/NAME`, and values of the training script under their own names.

    If files can no longer be written, a warning is logged and training continues. Whatever the writer raises counts: it may write
    by other libraries, which have errors of their own.

    Args:
        directory: of the event files. If this process writes there already, `directory.1` is used, and so on.
        interval: steps between metrics, which are then means per step; 0: with every step.

    Raises:
        ImportError: tensorboard is not installed (`preflight.check_start` says so with the key).
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, interval: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = _free(directory.resolve())
        self._writer: Any = SummaryWriter(str(self._directory))
        _boards.add(self)
        self._interval = max(1, interval)
        self._since = Interval()
        self._shown: set[str] = set()  # metrics that have had another value than 0

    def step(self, number: int, metrics: RuntimeMetrics, given: Mapping[str, float]) -> None:
        """Step `number` has ended.

        Args:
            metrics: totals.
            given: values of the training script in this step.
        """
        values = dict(given)
        if number % self._interval == 0:
            found = self._since.end(metrics)
            self._shown |= {name for name, value in found.items() if value}
            values |= {f"ssdtrain/{name}": value for name, value in found.items() if name in self._shown}
        self.values(number, values)

    def values(self, number: int, values: Mapping[str, float]) -> None:
        """Write values of step `number` under their own names."""
        writer = self._writer  # another thread may close it meanwhile
        if writer is None:
            return
        try:
            for name, value in values.items():
                writer.add_scalar(name, value, number)
        except Exception as error:  # noqa: BLE001 - see above
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        logger.warning(
            "report.tensorboard: %s cannot be written (%s: %s); no more values are recorded, training continues. To record them, "
            "free space or set report.tensorboard to another directory, and restart",
            self._directory,
            type(error).__name__,
            error,
        )
        self._writer = None

    def close(self) -> None:
        """Write what is buffered. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:  # noqa: BLE001 - see above
            logger.warning(
                "report.tensorboard: %s could not be closed (%s: %s): its last values may be missing",
                self._directory,
                type(error).__name__,
                error,
            )


def _free(directory: Path) -> Path:
    """This directory, or one beside it, that no writer of this process has."""
    taken = {board._directory for board in _boards if board._writer is not None}
    more = (directory.with_name(f"{directory.name}.{number}") for number in itertools.count(1))
    return next(found for found in itertools.chain([directory], more) if found not in taken)
