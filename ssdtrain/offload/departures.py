"""When the tensors of stores leave the device: at points of the tape, and not of time, for the same peak in every run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ssdtrain.offload.region import Region
from ssdtrain.offload.transfer_state import State

__all__ = ["Departures"]

_STORING = State.STORING


class Departures:
    """The stores whose tensors are still on the device, the oldest first. Called with the engine's lock held.

    Note: [Departure of parts]
    Tensors that leave whole go when later stores have taken their place on the device. Where tensors are so large that they leave
    in part, few are stored, and that place may never be taken: those go when so many bytes were saved since, stored or not.

    Args:
        depart: lets the stream of a region wait for its copy and empties the tensor.
    """

    def __init__(self, depart: Callable[[Region], None]) -> None:
        self.limit = 0
        """Bytes of stores that may still be on the device when the next one begins."""
        self._depart = depart
        self._regions: deque[Region] = deque()
        self._bytes = 0
        self.parting: list[Region] = []
        """Those that leave in part. See Note: [Departure of parts]."""

    def add(self, region: Region, saved: int) -> None:
        """The store of `region` has begun: let the oldest tensors go until no more than `limit` bytes of them are left. What
        backward is about to need stays.

        Args:
            saved: bytes, of all regions so far.
        """
        if region.transfer.rest is not None:
            self.parting.append(region)
        else:
            self._add_whole(region)
        if self.parting:
            self.advance(saved)

    def advance(self, saved: int) -> None:
        """So many bytes were saved so far: let regions go that leave in part. See Note: [Departure of parts]."""
        staying = []
        for region in self.parting:
            if _on_its_way(region) and saved - region.transfer.saved_before <= self.limit:
                staying.append(region)
            elif _on_its_way(region):
                self._let_go(region)
        self.parting = staying

    def _add_whole(self, region: Region) -> None:
        regions, limit = self._regions, self.limit
        regions.append(region)
        self._bytes += region.nbytes
        while regions:
            oldest = regions[0]
            leaves = _on_its_way(oldest)
            if leaves and self._bytes <= limit:
                return
            regions.popleft()
            self._bytes -= oldest.nbytes
            if leaves:
                self._let_go(oldest)

    def _let_go(self, region: Region) -> None:
        # One whose owner has freed it is seen to when its store ends.
        if not region.transfer.keep_resident and not region.freed():
            self._depart(region)


def _on_its_way(region: Region) -> bool:
    """True if the bytes are being stored, and still in their tensor."""
    return region.pointer != 0 and region.transfer.state is _STORING
