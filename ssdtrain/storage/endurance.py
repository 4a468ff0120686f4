"""Projected life of a drive under a training run.

Computed from the vendor's rating, which assumes small random writes and a year's retention. Activations are large sequential
writes that are kept for seconds, so the actual endurance is higher (SSDTrain, arXiv 2408.10013).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdtrain.storage.drive import drive_of

SECONDS_PER_YEAR = 365 * 86400


def rated_bytes(size: int, *, writes_per_day: float = 1.0) -> float:
    """Estimated total bytes written (TBW): capacity x drive writes per day, over the 5 years of a usual warranty."""
    return size * writes_per_day * 365 * 5


def projected_life(rated: float, bytes_per_step: float, step_seconds: float) -> float:
    """Seconds until `rated` bytes are written at `bytes_per_step` every `step_seconds`; infinite if nothing is written."""
    if bytes_per_step <= 0:
        return float("inf")
    if step_seconds <= 0:
        raise ValueError(f"step_seconds must be positive, got {step_seconds}")
    return rated / bytes_per_step * step_seconds


@dataclass(frozen=True)
class Rating:
    """What a drive may be written.

    Args:
        writes_per_day: of its capacity, over the 5 years of a usual warranty.
        total: bytes written (TBW) in place of that; None: not given.
        years: that it should live at the rate of this run.
    """

    writes_per_day: float = 1.0
    total: int | None = None
    years: float = 5.0

    def rated(self, size: int) -> float:
        """Bytes that a drive of `size` bytes may be written."""
        return self.total if self.total is not None else rated_bytes(size, writes_per_day=self.writes_per_day)


class Endurance:
    """Bytes that the drives behind a rank's directories may still be written, from their rating and wear.

    Args:
        directories: existing directories of this rank.
        others: directories of the other ranks of this node, which need not exist. A drive's remaining bytes are divided by
            the ranks that share it.
        rating: as the config says; None: one capacity a day.

    Directories without a disk (tmpfs, network) are skipped where the config gives no rating; else their file system counts as a
    drive.
    """

    def __init__(
        self, directories: Sequence[Path], others: Sequence[Sequence[Path]] = (), rating: Rating | None = None
    ) -> None:
        self._rating = rating or Rating()
        self._device: dict[str, str] = {}
        self._bytes: dict[str, float] = {}
        for directory in directories:
            drive = drive_of(directory)
            if not drive.device and rating is None:
                continue
            smart = drive.smart()
            left = 1.0 - min(1.0, smart.percentage_used / 100) if smart is not None else 1.0
            number = directory.stat().st_dev
            ranks = 1 + sum(any(_device_number(path) == number for path in paths) for paths in others)
            device = drive.device or drive.mount
            self._device[str(directory)] = device
            self._bytes[device] = self._rating.rated(drive.size) * left / ranks

    def life(self, written: Mapping[str, int], seconds: float) -> float | None:
        """Seconds until the first drive reaches its rating at the current rate; None if unknown or nothing was written.

        Args:
            written: bytes that this rank wrote per directory in `seconds`.
            seconds: elapsed training time.
        """
        by_device = self._by_device(written)
        if not by_device or seconds <= 0:
            return None
        return min(
            projected_life(self._bytes[device], nbytes, seconds) for device, nbytes in by_device.items()
        )

    def allowed_rate(self, written: Mapping[str, int]) -> float | None:
        """Bytes per second that this rank may write in all, for its drives to live as long as they should; None: unknown.

        Args:
            written: bytes per directory so far: by them the bytes to come are taken to be divided among the drives.
        """
        by_device = self._by_device(written) or {device: 1 for device in self._bytes}
        total = sum(by_device.values())
        seconds = self._rating.years * SECONDS_PER_YEAR
        rates = [self._bytes[device] / seconds * total / nbytes for device, nbytes in by_device.items()]
        return min(rates, default=None)

    @property
    def devices(self) -> list[str]:
        """Names of the drives."""
        return list(self._bytes)

    @property
    def years(self) -> float:
        """Seconds that the drives should live."""
        return self._rating.years

    def _by_device(self, written: Mapping[str, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for directory, nbytes in written.items():
            device = self._device.get(directory)
            if device is not None and nbytes > 0:
                found[device] = found.get(device, 0) + nbytes
        return found


def _device_number(path: Path) -> int:
    """Device number of the file system that holds `path` or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path.stat().st_dev
