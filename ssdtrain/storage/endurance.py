"""How long a drive lasts under a training run.

Activations are written in large sequential pieces and kept for seconds, so a drive takes far more of them than its rating,
which is measured with small random writes and a year's retention (SSDTrain, arXiv 2408.10013). The figures here
are by the rating, and so on the safe side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ssdtrain.storage.drive import drive_of

SECONDS_PER_YEAR = 365 * 86400


def rated_bytes(size: int, *, writes_per_day: float = 1.0, years: float = 5.0) -> float:
    """TBW in bytes, where the vendor's figure is not known: capacity x drive writes per day x warranty."""
    return size * writes_per_day * 365 * years


def projected_life(rated: float, bytes_per_step: float, step_seconds: float) -> float:
    """Seconds until `rated` bytes are written, by a run that writes `bytes_per_step` every `step_seconds`.

    Infinite where nothing is written.
    """
    if bytes_per_step <= 0:
        return float("inf")
    if step_seconds <= 0:
        raise ValueError(f"a step takes time, got {step_seconds} seconds")
    return rated / bytes_per_step * step_seconds


class Endurance:
    """What the drives behind a rank's directories may still be written, by rating and wear.

    Args:
        directories: existing ones of this rank.
        others: directories of the other ranks of this node, which need not exist: a drive that they share wears as many times as
            fast.

    Directories without a disk of their own (memory, overlay, network) have no rating and are left out.
    """

    def __init__(self, directories: Sequence[Path], others: Sequence[Sequence[Path]] = ()) -> None:
        self._device: dict[str, str] = {}
        self._bytes: dict[str, float] = {}
        for directory in directories:
            drive = drive_of(directory)
            if not drive.device:
                continue
            smart = drive.smart()
            left = 1.0 - min(1.0, smart.percentage_used / 100) if smart is not None else 1.0
            number = directory.stat().st_dev
            ranks = 1 + sum(any(_device_number(path) == number for path in paths) for paths in others)
            self._device[str(directory)] = drive.device
            self._bytes[drive.device] = rated_bytes(drive.size) * left / ranks

    def life(self, written: Mapping[str, int], seconds: float) -> float | None:
        """Seconds until the first drive has reached its rating if the run goes on as it did. None: not known, or no writes.

        Args:
            written: directory -> bytes that this rank wrote there in `seconds`.
            seconds: of the steps so far.
        """
        by_device: dict[str, int] = {}
        for directory, nbytes in written.items():
            device = self._device.get(directory)
            if device is not None and nbytes > 0:
                by_device[device] = by_device.get(device, 0) + nbytes
        if not by_device or seconds <= 0:
            return None
        return min(
            projected_life(self._bytes[device], nbytes, seconds) for device, nbytes in by_device.items()
        )


def _device_number(path: Path) -> int:
    """Of the file system that `path` is on, or would be on if it were made."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path.stat().st_dev
