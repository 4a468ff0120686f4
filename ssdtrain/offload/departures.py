"""When the tensors of stores leave the device: at points of the tape, and not of time, for the same peak in every run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ssdtrain.offload.region import Region
from ssdtrain.offload.transfer_state import State

__all__ = ["Departures"]


class Departures:
    """The stores whose tensors are still on the device, the oldest first. Called with the engine's lock held.

    Args:
        depart: lets the stream of a region wait for its copy and empties the tensor.
    """

    def __init__(self, depart: Callable[[Region], None]) -> None:
        self.limit = 0
        """Bytes of stores that may still be on the device when the next one begins."""
        self._depart = depart
        self._regions: deque[Region] = deque()
        self._bytes = 0

    def add(self, region: Region) -> None:
        """The store of `region` has begun: let the oldest tensors go until no more than `limit` bytes of them are left. What
        backward is about to need stays."""
        self._regions.append(region)
        self._bytes += region.nbytes
        while self._regions and (self._bytes > self.limit or not _on_its_way(self._regions[0])):
            oldest = self._regions.popleft()
            self._bytes -= oldest.nbytes
            # One whose owner has freed it is seen to when its store ends.
            if _on_its_way(oldest) and not oldest.transfer.keep_resident and not oldest.freed():
                self._depart(oldest)


def _on_its_way(region: Region) -> bool:
    """True if the bytes are being stored, and still in their tensor."""
    return region.transfer.state is State.STORING and not region.emptied
