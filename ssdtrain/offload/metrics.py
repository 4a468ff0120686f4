"""What offloading did and what training paid for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["OffloadMetrics"]


@dataclass
class OffloadMetrics:
    """Counters since the engine was made. Bytes are those of the saved tensors' storages; seconds are of the host's clock."""

    saved_tensors: int = 0
    """Pack hooks answered, whatever the answer."""
    saved_bytes: int = 0
    """Bytes of all regions: what could have moved, each byte once."""
    offloaded_bytes: int = 0
    """Bytes handed to a tier."""
    kept_bytes: int = 0
    """Bytes of regions that stayed in memory: by plan, for want of room, or past the deadline."""
    kept_full_bytes: int = 0
    """Of these, because every tier was full or had failed."""
    kept_late_bytes: int = 0
    """Of these, because the stores in flight did not end within `offload.deadline`."""
    shared_tensors: int = 0
    """Saved tensors that joined a region which another had made."""
    packed_bytes: int = 0
    """Bytes of small strided views that were copied together before they left."""
    encoded_bytes: int = 0
    """Bytes of regions that left through a codec; what was written of them is in the store's figures."""
    cancelled_bytes: int = 0
    """Bytes whose store was cancelled before it began: SSD writes avoided."""
    forwarded_bytes: int = 0
    """Bytes handed back from memory while their store was still in flight."""
    loaded_bytes: int = 0
    """Bytes read back."""
    evicted_bytes: int = 0
    """Bytes prefetched and dropped again to make room."""
    outside_bytes: int = 0
    """Bytes loaded into buffers outside of the arena because it was full."""
    failed_stores: int = 0
    """Writes that failed and were done again on another tier, or kept in memory."""
    store_wait_seconds: float = 0.0
    """Time that forward waited for stores in flight."""
    load_wait_seconds: float = 0.0
    """Time that backward waited for loads."""
    load_waits: dict[tuple[int, int], float] = field(default_factory=dict)
    """The same by (chunk, index of the region on its tape): whose load backward waited for."""
    in_flight_bytes: int = 0
    """Bytes of stores in flight now."""
    live_regions: int = 0
    """Regions that a handle of autograd's still needs now."""
    activation_bytes: int = 0
    """Bytes alive for backward now: saved storages, the arena, loads outside of it."""
    activation_peak_bytes: int = 0
    """The most of these since the last `reset_peak`."""

    @property
    def stall_seconds(self) -> float:
        """All that training waited for."""
        return self.store_wait_seconds + self.load_wait_seconds

    def count_load_wait(self, chunk: int, index: int, seconds: float) -> None:
        """Backward waited for the load of region `index` on a tape of `chunk`."""
        self.load_wait_seconds += seconds
        self.load_waits[chunk, index] = self.load_waits.get((chunk, index), 0.0) + seconds

    def copy(self) -> OffloadMetrics:
        """A snapshot."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["load_waits"] = dict(self.load_waits)
        return OffloadMetrics(**values)
