"""What offloading did and what training paid for it, as metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ssdtrain.metrics import MetricSet, Reduce, Unit, counter, gauge
from ssdtrain.profile.passes import HostTime
from ssdtrain.profile.time_spans import Spans
from ssdtrain.storage import Operation

if TYPE_CHECKING:
    from ssdtrain.offload.tensors.region import Region


@dataclass
class OffloadMetrics(MetricSet):
    """Counters since the engine was made. Bytes are those of the saved tensors' storages; seconds are of the host's clock."""

    saved_tensors: int = counter(Unit.COUNT)
    """Pack hooks answered, whatever the answer."""
    saved_bytes: int = counter(Unit.BYTES, "saved for backward")
    """Bytes of all regions: what could have moved, each byte once."""
    offloaded_bytes: int = counter(Unit.BYTES, "offloaded")
    """Bytes handed to a tier."""
    kept_bytes: int = counter(Unit.BYTES, "kept")
    """Bytes of regions, or parts of them, that stayed in memory: by plan, for want of room, or past the deadline."""
    kept_full_bytes: int = counter(Unit.BYTES, "kept as tiers are full")
    """Part of these: every tier was full or had failed."""
    kept_encoded_bytes: int = counter(Unit.BYTES, "kept encoded")
    """Part of these: encoded, in the memory that they were in."""
    kept_late_bytes: int = counter(Unit.BYTES, "kept as stores are late")
    """Part of these: the stores in flight did not end within `offload.deadline`."""
    shared_tensors: int = counter(Unit.COUNT)
    """Saved tensors that joined a region which another had made."""
    packed_bytes: int = counter(Unit.BYTES)
    """Bytes of small strided views that were copied together before they left."""
    encoded_bytes: int = counter(Unit.BYTES)
    """Bytes of regions that left through a codec; what was written of them is in the store's metrics."""
    payload_bytes: int = counter(Unit.BYTES)
    """Bytes of the payloads that these left as."""
    overflowed_bytes: int = counter(Unit.BYTES, "stored raw, codec full")
    """Bytes of regions that a codec of fixed size could not hold, and that were stored as they are."""
    uncoded_bytes: int = counter(Unit.BYTES, "stored raw, too large")
    """Bytes of regions on a GPU that were stored as they are, since their payload would not fit in the device limit, or there was
    no memory for it."""
    avoided_write_bytes: int = counter(Unit.BYTES, "writes avoided")
    """Bytes whose store was cancelled before it began, because backward came first. They are not among `offloaded_bytes`."""
    forwarded_bytes: int = counter(Unit.BYTES)
    """Bytes handed back from memory while their store was still in flight."""
    loaded_bytes: int = counter(Unit.BYTES)
    """Bytes read back."""
    verified_bytes: int = counter(Unit.BYTES)
    """Part of these: their checksum was compared with that of what was written."""
    evicted_bytes: int = counter(Unit.BYTES)
    """Bytes prefetched and dropped again to make room."""
    outside_bytes: int = counter(Unit.BYTES)
    """Bytes loaded into buffers outside of the arena because it was full."""
    failed_stores: int = counter(Unit.COUNT, "failed stores")
    """Writes that failed and were done again on another tier, or kept in memory."""
    store_wait_seconds: float = counter(Unit.SECONDS, "waited for stores", ranks=Reduce.MAX)
    """Time that forward waited for stores in flight."""
    load_wait_seconds: float = counter(Unit.SECONDS, "waited for loads", ranks=Reduce.MAX)
    """Time that backward waited for loads."""
    load_waits: dict[str, float] = field(default_factory=dict)
    """The same by the module that saved the tensor, or by its chunk and region where no module names are known."""
    codec_seconds: float = counter(Unit.SECONDS, "codec time", ranks=Reduce.MAX)
    """Time that training spent encoding and decoding on the host; on a GPU, launching these kernels."""
    in_flight_bytes: int = gauge(Unit.BYTES, ranks=Reduce.SUM)
    """Bytes of stores in flight now."""
    live_regions: int = gauge(Unit.COUNT, ranks=Reduce.SUM)
    """Regions that a handle of autograd's still needs now."""
    activation_bytes: int = gauge(Unit.BYTES)
    """Bytes alive for backward now: saved storages, the arena, loads outside of it."""
    unoffloaded_peak_bytes: int = gauge(Unit.BYTES, "activation peak without SSDTrain")
    """The most bytes that would have been alive for backward had nothing left memory, since the last `reset_peak`: each saved
    storage counts until it is dead and the last saved tensor over it is released."""
    activation_peak_bytes: int = gauge(Unit.BYTES, "with it")
    """The most `activation_bytes` since the plan that is followed began, or the last `reset_peak`."""
    buffer_bytes: int = gauge(Unit.BYTES, "of which buffers")
    """Bytes of the arena of reusable buffers now. 0 on a GPU: there it is pinned host memory, which activations do not take."""

    storing_seconds: float = field(default=0.0, repr=False, compare=False)
    """Time that training spent on beginning stores, without waits; measured where the host computes."""

    spans: Spans | None = field(default=None, repr=False, compare=False)
    """Also gets each wait and transfer; None: no trace is recorded.
    The thread that ends a step sets it: read it once."""

    @property
    def carried(self) -> float:
        """Bytes that are moved to a tier of each byte that leaves: below 1 where codecs encode them."""
        left = self.offloaded_bytes + self.avoided_write_bytes
        return 1 - (self.encoded_bytes - self.payload_bytes) / left if left else 1.0

    @property
    def stall_seconds(self) -> float:
        """All that training waited for."""
        return self.store_wait_seconds + self.load_wait_seconds

    def transfers(self) -> HostTime:
        """Return what transfers took of the host's time so far."""
        return HostTime(self.store_wait_seconds, self.load_wait_seconds, self.storing_seconds)

    def count_store_wait(self, cause: str, name: str, seconds: float) -> None:
        """Forward waited before it could store a region of this name. Causes: see `Span.kind`."""
        self.store_wait_seconds += seconds
        if (spans := self.spans) is not None:
            spans.waited(cause, name, seconds)

    def count_load_wait(self, cause: str, name: str, seconds: float) -> None:
        """Backward waited for the load of a region of this name."""
        self.load_wait_seconds += seconds
        self.load_waits[name] = self.load_waits.get(name, 0.0) + seconds
        if (spans := self.spans) is not None:
            spans.waited(cause, name, seconds)

    def count_codec(self, name: str, began: float) -> None:
        """A region of this name was encoded or decoded, from `began` (`time.perf_counter`) until now."""
        ended = time.perf_counter()
        self.codec_seconds += ended - began
        if (spans := self.spans) is not None:
            spans.add("codec", name, began, ended)

    def count_transfer(self, track: str, region: Region, operation: Operation) -> None:
        """A store or a load of the region has ended well. `track` is "stores" or "loads". A copy of the device between host
        memory and itself has no times of its own."""
        if (spans := self.spans) is not None and operation.began:
            spans.moved(track, region.name, operation.nbytes, operation.began, operation.seconds)

    def copy(self) -> OffloadMetrics:
        """Return a snapshot."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["load_waits"] = dict(self.load_waits)
        return OffloadMetrics(**values)
