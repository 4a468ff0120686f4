"""Metrics of a store and its tiers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssdtrain.metrics import MetricSet, Reduce, Unit, counter, gauge

if TYPE_CHECKING:
    from ssdtrain.storage.arena import Arena
    from ssdtrain.storage.slab import Slab
    from ssdtrain.storage.slot import Slot

TransferTotals = tuple[list[tuple[int, int, float, float]], int]
"""Result of `Pool.counters`."""


def transfers_since(now: TransferTotals, before: TransferTotals) -> TransferTotals:
    """What was transferred between two calls of `Pool.counters`."""
    queues = [
        (new[0] - old[0], new[1] - old[1], new[2] - old[2], new[3] - old[3])
        for new, old in zip(now[0], before[0], strict=True)
    ]
    return queues, now[1] - before[1]


@dataclass(frozen=True)
class EnduranceMetrics(MetricSet):
    """Metrics of the drives behind the tiers."""

    ssd_life_seconds: float | None = gauge(Unit.SECONDS, "projected SSD life", ranks=Reduce.MIN, unknown=True)
    """Until the first drive has reached its rating (one drive write a day for five years, less its current wear), if the run goes
    on as it did. See `ssdtrain.storage.Endurance`."""


@dataclass(frozen=True)
class TierMetrics:
    """One drive or the host tier. Bytes are payload; seconds are those with at least one transfer in flight."""

    path: str
    capacity: int
    """Maximum bytes."""
    allocated: int
    """Current size of the spill file, bytes."""
    used: int
    """Bytes allocated to live slots, rounded up to blocks and including the edge blocks."""
    bytes_written: int
    bytes_read: int
    write_seconds: float
    read_seconds: float
    direct: bool = False
    retired: bool = False


@dataclass(frozen=True)
class StoreMetrics(MetricSet):
    """Totals of a store since its creation. Bytes are those transferred: after encoding, without cancelled operations."""

    engine: str = "none"
    host_bytes_written: int = counter(Unit.BYTES, "to host memory")
    ssd_bytes_written: int = counter(Unit.BYTES, "to SSD")
    host_bytes_read: int = counter(Unit.BYTES, "from host memory")
    ssd_bytes_read: int = counter(Unit.BYTES, "from SSD")
    cancelled_io_bytes: int = counter(Unit.BYTES)
    """Bytes of transfers, reads too, that were queued and cancelled before they started."""
    write_seconds: float = counter(Unit.SECONDS, ranks=Reduce.MAX)
    """Summed over tiers, with at least one write in flight. Copies that a device makes to the host tier are not in it."""
    read_seconds: float = counter(Unit.SECONDS, ranks=Reduce.MAX)
    """The same of reads."""
    host_tier_bytes: int = gauge(Unit.BYTES, "in host memory", ranks=Reduce.SUM)
    """Bytes of the host tier currently in use."""
    spill_file_bytes: int = gauge(Unit.BYTES, "on drives", ranks=Reduce.SUM)
    """Size of the spill files, whose space is reused and never shrinks."""
    live_slots: int = gauge(Unit.COUNT, ranks=Reduce.SUM)
    """Slots in use now."""
    live_bytes: int = gauge(Unit.BYTES, ranks=Reduce.SUM)
    """Bytes that were reserved in them."""
    capacity_bytes: int = gauge(Unit.BYTES, ranks=Reduce.SUM)
    """Maximum bytes of all tiers."""
    drives: tuple[TierMetrics, ...] = ()
    host: TierMetrics | None = None

    @classmethod
    def of(
        cls,
        engine: str,
        slabs: Sequence[Slab],
        arena: Arena | None,
        transfers: TransferTotals,
        copied: Sequence[int],
        live: Collection[Slot],
    ) -> StoreMetrics:
        """Collect the metrics of these drives and this host tier; the caller holds the store's lock.

        Args:
            copied: bytes into the host tier and out of it that a device has copied itself.
            live: slots in use.
        """
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
            host_bytes_written=host.bytes_written + copied[0] if host else 0,
            ssd_bytes_written=sum(drive.bytes_written for drive in drives),
            host_bytes_read=host.bytes_read + copied[1] if host else 0,
            ssd_bytes_read=sum(drive.bytes_read for drive in drives),
            cancelled_io_bytes=cancelled,
            write_seconds=sum(tier.write_seconds for tier in tiers),
            read_seconds=sum(tier.read_seconds for tier in tiers),
            host_tier_bytes=host.used if host else 0,
            spill_file_bytes=sum(drive.allocated for drive in drives),
            live_slots=len(live),
            live_bytes=sum(slot.nbytes for slot in live),
            capacity_bytes=sum(tier.capacity for tier in tiers),
            drives=drives,
            host=host,
        )

    @property
    def bytes_written(self) -> int:
        """Bytes written to all tiers."""
        return self.host_bytes_written + self.ssd_bytes_written

    @property
    def bytes_read(self) -> int:
        """Bytes read from all tiers."""
        return self.host_bytes_read + self.ssd_bytes_read
