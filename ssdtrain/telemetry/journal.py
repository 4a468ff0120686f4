"""What each step moved and waited for: a JSON line per step, and a log line now and then."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from pathlib import Path
from typing import Any, TextIO

from ssdtrain.comm import CommMetrics
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.storage import StoreMetrics
from ssdtrain.telemetry.lines import write_line
from ssdtrain.telemetry.text import duration_text, size_text

__all__ = ["Journal"]

logger = logging.getLogger("ssdtrain")

# Counters of which a line has what the step added.
_COUNTED = (
    "saved_bytes",
    "offloaded_bytes",
    "kept_bytes",
    "cancelled_bytes",
    "forwarded_bytes",
    "loaded_bytes",
    "outside_bytes",
    "failed_stores",
    "store_wait_seconds",
    "load_wait_seconds",
)
_LOGGED = ("seconds", "saved_bytes", "ssd_bytes_written", "store_wait_seconds", "load_wait_seconds")
_COMM = ("calls", "compressed", "raw_bytes", "wire_bytes", "codec_seconds", "wait_seconds", "device_seconds")
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
        self._last = OffloadMetrics()
        self._last_written = self._last_read = 0
        self._last_comm: dict[str, CommMetrics] = {}
        self._logged: dict[str, Any] = {}
        self._logged_steps = 0

    def step(
        self,
        step: int,
        seconds: float,
        offload: OffloadMetrics | None,
        store: StoreMetrics | None,
        comm: dict[str, CommMetrics],
    ) -> None:
        """Step number `step` is over and took `seconds`; the statistics are totals, the line has the differences.

        What is not enabled is None, or has no dimension, and the line does not speak of it.
        """
        record: dict[str, Any] = {"step": step, "seconds": seconds}
        if offload is not None and store is not None:
            self._offload(record, offload, store)
        if comm:
            record["comm"] = self._comm(comm)
        if self._stream is not None:
            try:
                write_line(self._stream, record)
            except OSError as error:
                self._drop(error)
        if self._interval:
            present = [name for name in _LOGGED if name in record]
            for name in present:
                self._logged[name] = self._logged.get(name, 0) + record[name]
            for found in record.get("comm", {}).values():
                for name in ("raw_bytes", "wire_bytes"):
                    self._logged[name] = self._logged.get(name, 0) + found[name]
            self._logged_steps += 1
            if step % self._interval == 0:
                self._log(step, offload)

    def _offload(self, record: dict[str, Any], offload: OffloadMetrics, store: StoreMetrics) -> None:
        for name in _COUNTED:
            record[name] = getattr(offload, name) - getattr(self._last, name)
        record["ssd_bytes_written"] = store.ssd_bytes_written - self._last_written
        record["ssd_bytes_read"] = store.ssd_bytes_read - self._last_read
        record["activation_peak_bytes"] = offload.activation_peak_bytes
        record["load_waits"] = self._worst_waits(offload)
        self._last, self._last_written, self._last_read = (
            offload,
            store.ssd_bytes_written,
            store.ssd_bytes_read,
        )

    def _comm(self, comm: dict[str, CommMetrics]) -> dict[str, dict[str, float]]:
        found = {}
        for dimension, now in comm.items():
            before = self._last_comm.get(dimension, CommMetrics())
            found[dimension] = {name: getattr(now, name) - getattr(before, name) for name in _COMM}
        self._last_comm = comm
        return found

    def _worst_waits(self, offload: OffloadMetrics) -> list[dict[str, Any]]:
        waits = {
            key: total - self._last.load_waits.get(key, 0.0) for key, total in offload.load_waits.items()
        }
        worst = sorted(((seconds, key) for key, seconds in waits.items() if seconds > 0), reverse=True)[
            :_WORST
        ]
        return [{"chunk": chunk, "region": region, "seconds": seconds} for seconds, (chunk, region) in worst]

    def _log(self, step: int, offload: OffloadMetrics | None) -> None:
        mean = {name: total / self._logged_steps for name, total in self._logged.items()}
        parts = []
        if offload is not None:
            parts.append(
                f"{size_text(mean['saved_bytes'])} saved for backward, {size_text(mean['ssd_bytes_written'])} written to SSD, "
                f"activation peak {size_text(offload.activation_peak_bytes)}, waited "
                f"{duration_text(mean['store_wait_seconds'])} for stores and {duration_text(mean['load_wait_seconds'])} for loads"
            )
        if "wire_bytes" in mean:
            parts.append(
                f"{size_text(mean['wire_bytes'])} sent to other ranks instead of {size_text(mean['raw_bytes'])}"
            )
        logger.info(
            "step %d: %s of %s (means over %d steps)",
            step,
            ", ".join(parts),
            duration_text(mean["seconds"]),
            self._logged_steps,
        )
        self._logged.clear()
        self._logged_steps = 0

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
