"""Bytes of saved tensors by the module that saved them, counted when a region is released: only then it is known whether it left
memory. Nothing is counted, and no time spent, where no tally is in place."""

from __future__ import annotations

from collections.abc import Callable

from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.transfer.state import State

_AWAY = frozenset({State.STORING, State.STORED, State.LOADING, State.LOADED})


class ModuleTally:
    """Counts what is released: see `OffloadEngine.observe_releases`.

    Args:
        metrics: the engine's.

    Attributes:
        offloaded_bytes: of regions, or parts of them, that were written to a tier, by `Region.name`.
        kept_bytes: of the others: kept by the policy or for want of room, or needed before their store began.
        names: module by `Region.place`, where it is known; "": there were several.
    """

    def __init__(self, metrics: OffloadMetrics) -> None:
        self._metrics = metrics
        self.offloaded_bytes: dict[str, int] = {}
        self.kept_bytes: dict[str, int] = {}
        self.names: dict[str, str] = {}

    def release(self, release: Callable[[Region], None], region: Region) -> None:
        """Release `region` by `release`, and count it."""
        transfer, metrics = region.transfer, self._metrics
        away = transfer.forwarded or transfer.state in _AWAY
        offloaded = metrics.offloaded_bytes
        release(region)
        if offloaded > metrics.offloaded_bytes:  # a store that had not begun was cancelled
            away = False
        moved = region.transfer.moved_bytes if away else 0
        for counted, nbytes in ((self.offloaded_bytes, moved), (self.kept_bytes, region.nbytes - moved)):
            if nbytes:
                counted[region.name] = counted.get(region.name, 0) + nbytes
        if region.module and self.names.setdefault(region.place, region.module) != region.module:
            self.names[region.place] = ""
