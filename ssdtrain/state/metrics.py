"""Metrics of model state in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from ssdtrain.metrics import MetricSet, Reduce, Unit, counter, gauge


@dataclass
class StateMetrics(MetricSet):
    """Parameters, gradients and optimizer state of a model in chunks."""

    loaded_bytes: int = counter(Unit.BYTES, "loaded")
    """Read from the tiers."""
    stored_bytes: int = counter(Unit.BYTES, "stored")
    """Written to the tiers."""
    load_wait_seconds: float = counter(Unit.SECONDS, "waited for loads", ranks=Reduce.MAX)
    """Time that forwards, backwards and steps waited for loads."""
    store_wait_seconds: float = counter(Unit.SECONDS, "waited for stores", ranks=Reduce.MAX)
    """Time that forwards, backwards and steps waited for stores to make room."""
    step_wait_seconds: float = counter(Unit.SECONDS, "waited for the optimizer's thread", ranks=Reduce.MAX)
    """Time that forwards, backwards and steps waited for chunks that the CPU steps."""
    prefetched_chunks: int = counter(Unit.COUNT)
    """Loads of a chunk that began before it was needed."""
    resident_bytes: int = gauge(Unit.BYTES, "on the device")
    """Parameters, gradients and optimizer state on the device; those that stay there count from the start."""
    resident_peak_bytes: int = gauge(Unit.BYTES, "peak on the device")
    """Maximum of `resident_bytes`."""
    limit_bytes: int = gauge(Unit.BYTES)
    """`state.device_limit`, or what it is by default."""
    chunks: int = gauge(Unit.COUNT)
    """Chunks of the model."""
    persistent_chunks: int = gauge(Unit.COUNT)
    """Chunks that stay on the device."""
