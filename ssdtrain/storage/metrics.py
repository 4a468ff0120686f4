"""The figures of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdtrain.storage.arena import Arena
    from ssdtrain.storage.slab import Slab

Transfers = tuple[list[tuple[int, int, float, float]], int]
"""What a pool counted: see `Pool.counters`."""


@dataclass(frozen=True)
class TierMetrics:
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
class StoreMetrics:
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
    drives: tuple[TierMetrics, ...]
    host: TierMetrics | None

    @classmethod
    def of(
        cls,
        engine: str,
        slabs: Sequence[Slab],
        arena: Arena | None,
        transfers: Transfers,
        live_slots: int,
        live_bytes: int,
    ) -> StoreMetrics:
        """Of these drives and this host tier, of which the caller holds the lock."""
        queues, cancelled = transfers
        drives = tuple(
            TierMetrics(
                str(s.directory), s.capacity, s.allocator.size, s.used, *queues[s.index], s.direct, s.retired
            )
            for s in slabs
        )
        host = None
        if arena is not None:
            host = TierMetrics("host memory", arena.capacity, arena.capacity, arena.allocated, *queues[-1])
        tiers = [*drives, *([host] if host else [])]
        return cls(
            engine=engine,
            bytes_written=sum(tier.bytes_written for tier in tiers),
            bytes_read=sum(tier.bytes_read for tier in tiers),
            bytes_cancelled=cancelled,
            live_slots=live_slots,
            live_bytes=live_bytes,
            capacity=sum(tier.capacity for tier in tiers),
            write_seconds=sum(tier.write_seconds for tier in tiers),
            read_seconds=sum(tier.read_seconds for tier in tiers),
            drives=drives,
            host=host,
        )

    @property
    def ssd_bytes_written(self) -> int:
        return sum(drive.bytes_written for drive in self.drives)

    @property
    def ssd_bytes_read(self) -> int:
        return sum(drive.bytes_read for drive in self.drives)
