"""The part of a region that stays in memory while the rest of it is in a tier.

Note: [Parts of a region]
A policy may offload a part of a region (`Action.part`): its leading bytes, whole pages. A storage is freed as a whole, so the
last bytes are copied out of it when the store begins, behind the same work as the bytes that are stored: nothing that happens to
the tensor later gets into only one of the two. Until the tensor is emptied there are two copies of what stays. A load brings the
leading bytes to their place in memory for the whole region, and the others are copied behind them.

The copy is made on the stream that begins the store, before the copy off the device, whose event therefore covers it: what
empties the tensor waits for both. It is read on the load stream, which may still do so when the region is released: see
Note: [Buffers in passing] in `staged`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ssdtrain.device import Device, Event
from ssdtrain.offload.policy import Action
from ssdtrain.offload.tensors.region import Region

PAGE = 4096
"""A part is a whole number of these bytes, so that both parts of a region are aligned."""


def moved_bytes(nbytes: int, action: Action) -> int:
    """Return how many bytes of a region leave where a part of it is offloaded: whole pages, one at least.

    Raises:
        ValueError: the part is not above 0 and up to 1.
    """
    part = action.part
    if not 0 < part <= 1:
        raise ValueError(
            f"an offload policy returned {action}: its part must be above 0 and up to 1; use KEEP for 0"
        )
    return nbytes if part == 1 else min(nbytes, max(1, int(part * nbytes) // PAGE) * PAGE)


class Rests:
    """Copies what stays of regions out of their tensors, and into the memory that a load fills.

    Args:
        device: its streams do the copies.
        seen: counts the memory of a copy until it dies.
    """

    def __init__(self, device: Device, seen: Callable[[torch.UntypedStorage], None]) -> None:
        self._device = device
        self._seen = seen

    def take(self, region: Region) -> torch.Tensor | None:
        """A copy (uint8) of the bytes of `region` that stay, made on the current stream. None: there is no memory for it."""
        try:
            rest = self._device.clone(bytes_of(region, region.transfer.moved_bytes, region.nbytes))
        except torch.OutOfMemoryError:
            return None
        self._seen(rest.untyped_storage())
        return rest

    def put_back(self, region: Region, whole: torch.Tensor) -> Event | None:
        """Queue the copy of them into their place in `whole` (uint8), behind other copies of the load stream."""
        rest = region.transfer.rest
        assert rest is not None
        nbytes = rest.numel()
        target = whole.data_ptr() + whole.numel() - nbytes
        return self._device.copy_to_device(rest.data_ptr(), target, nbytes, within=True)


def bytes_of(region: Region, begin: int, end: int) -> torch.Tensor:
    """Return bytes [begin, end) (uint8) of a region that is in its tensor."""
    source = torch.empty(0, dtype=torch.uint8, device=region.tensor.device)
    return source.set_(region.tensor.untyped_storage(), region.start + begin, (end - begin,), (1,))
