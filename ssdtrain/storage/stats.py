"""The figures of a store."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TierStats:
    """One drive, or the host tier. Bytes are payload; seconds are those with at least one transfer under way."""

    path: str
    capacity: int
    """Bytes it may hold."""
    allocated: int
    """Bytes the spill file has now."""
    used: int
    """Bytes of live slots as allocated: rounded up to blocks, with room for the edges."""
    bytes_written: int
    bytes_read: int
    write_seconds: float
    read_seconds: float
    direct: bool = False
    retired: bool = False


@dataclass(frozen=True)
class Stats:
    """A store since it was made. The totals cover the drives and the host tier."""

    engine: str
    bytes_written: int
    bytes_read: int
    bytes_cancelled: int
    """Bytes of operations, both ways, that were cancelled before they began."""
    live_slots: int
    live_bytes: int
    capacity: int
    write_seconds: float
    read_seconds: float
    drives: tuple[TierStats, ...]
    host: TierStats | None

    @property
    def ssd_bytes_written(self) -> int:
        return sum(drive.bytes_written for drive in self.drives)

    @property
    def ssd_bytes_read(self) -> int:
        return sum(drive.bytes_read for drive in self.drives)
