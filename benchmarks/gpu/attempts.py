"""What was measured so far, in a file: a run that is cut off goes on with what is missing."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import Geometry, Measured, measure
from ssdtrain.text import size_text

__all__ = ["RESERVE", "AttemptFailed", "Attempts", "DriveTooSlow", "TimeIsOver"]

RESERVE = 90.0
"""Seconds that one attempt may take: none is begun later than so long before the end."""


LEAST_STEPS = 3
"""Steps of the shortest attempt."""


class TimeIsOver(Exception):
    """The next attempt might not end in time; or the process cannot be used any more, and a new one may go on."""


class AttemptFailed(Exception):
    """It ended with an error other than for lack of device memory, or never ended. Says nothing about what fits."""


class DriveTooSlow(Exception):
    """It was not begun: three steps would take longer than an attempt may. One that is cut off would count as one that hung."""


class Attempts:
    """Measures each way of each geometry once.

    The file has one JSON object a line: {"key": [geometry, way, steps, *setting]} when an attempt begins, and the same with
    "found" (the fields of `Measured`; null: it does not fit) or "error" when it has ended. One that never ended (it hung, or was
    killed) is not begun again. Lines of another setting are left alone.

    Args:
        file: is appended to; None: nothing is kept.
        seconds: of this process, from now on.
        setting: what else figures depend on, and is the same for all attempts of this process: device, sources, directory.
        drive: bytes per second that the drive writes, and that it reads, as measured now; None: not to be asked.

    Attributes:
        too_slow: attempts that the drive is too slow for, and why.
    """

    def __init__(
        self,
        file: Path | None,
        seconds: float,
        setting: tuple[str, ...],
        drive: tuple[float, float] | None = None,
    ) -> None:
        self._file = file
        self._drive = drive
        self.too_slow: list[str] = []
        self._setting = setting
        self._ends = time.monotonic() + seconds
        self._found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for line in file.read_text().splitlines() if file is not None and file.exists() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the process was killed while it wrote this line
            if tuple(entry["key"][3:]) == setting:
                self._found[tuple(entry["key"])] = {"error": "it did not end", **entry}

    @property
    def errors(self) -> list[str]:
        """Of attempts that failed otherwise than for lack of memory."""
        return [
            f"{', '.join(map(str, key[:3]))}: {entry['error'].splitlines()[-1]}"
            for key, entry in self._found.items()
            if "found" not in entry
        ]

    def measure(self, geometry: Geometry, way: str, *, steps: int, **options: Any) -> Measured | None:
        """None: it does not fit into the memory of the device.

        Raises:
            AttemptFailed: it has failed, now or when it was begun.
            DriveTooSlow: it is not begun.
            TimeIsOver: it was not begun; or it broke the CUDA context.
        """
        key = (geometry.name, way, steps, *self._setting)
        if key not in self._found:
            if way.startswith("ssd") and self._drive is not None:
                self._check_drive(geometry, way)
            if time.monotonic() > self._ends - RESERVE:
                raise TimeIsOver
            self._write({"key": key})
            self._found[key] = self._attempt(geometry, way, steps=steps, **options)
            self._write({"key": key, **self._found[key]})
            if "CUDA error" in self._found[key].get("error", ""):
                raise TimeIsOver
        if "found" not in self._found[key]:
            raise AttemptFailed(self._found[key]["error"].splitlines()[-1])
        found = self._found[key]["found"]
        return None if found is None else Measured(**found)

    def _check_drive(self, geometry: Geometry, way: str) -> None:
        """Half of the time of an attempt is for its start and its computation."""
        assert self._drive is not None
        written, read = self._drive
        seconds = LEAST_STEPS * geometry.saved_bytes * (1 / written + 1 / read)
        if seconds > RESERVE / 2:
            why = (
                f"{geometry.name}, {way}: {LEAST_STEPS} steps would move {size_text(geometry.saved_bytes)} each in "
                f"{seconds:.0f} s (the drive writes {size_text(written)}/s and reads {size_text(read)}/s)"
            )
            if why not in self.too_slow:
                self.too_slow.append(why)
            raise DriveTooSlow(why)

    def _attempt(self, geometry: Geometry, way: str, **options: Any) -> dict[str, Any]:
        try:
            return {"found": dataclasses.asdict(measure(geometry, way, **options))}
        except torch.OutOfMemoryError:
            found: dict[str, Any] = {"found": None}
        except Exception:  # noqa: BLE001 - it is recorded, and the other ways are measured
            found = {"error": traceback.format_exc()[-4000:].strip()}
        if "CUDA error" not in found.get("error", ""):
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return found

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(entry) + "\n")
