"""All figures of a runtime in one object."""

from __future__ import annotations

from ssdtrain.comm import CommMetrics
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.storage import StoreMetrics

__all__ = ["NOTHING_STORED", "RuntimeMetrics"]

NOTHING_STORED = StoreMetrics("none", 0, 0, 0, 0, 0, 0, 0.0, 0.0, (), None)
"""Of a runtime without tiers."""


class RuntimeMetrics:
    """What happened since the runtime was made: `offload` from the engine, `store` from the tiers, `comm` from the collectives by
    parallel dimension, steps and their seconds. Of what is not enabled there are zeros, or no dimension."""

    __slots__ = ("comm", "offload", "step_seconds", "steps", "store")

    def __init__(
        self,
        offload: OffloadMetrics,
        store: StoreMetrics,
        comm: dict[str, CommMetrics],
        steps: int,
        step_seconds: float,
    ) -> None:
        self.offload = offload
        self.store = store
        self.comm = comm
        self.steps = steps
        self.step_seconds = step_seconds
