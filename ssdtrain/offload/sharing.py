"""Which saved tensors share a region.

Note: [Regions by storage]
Storages are known by weak reference, never by address: an address is used again as soon as its storage dies. A saved tensor
joins a region of the same tape that contains its bytes and watches the same version counter.

Note: [Regions of one tape]
A version counter does not see writes by NumPy, a loader in C++, another owner of a DLPack capsule or a kernel that does
not declare them. A region of an earlier forward is therefore a snapshot that is never joined: buffers are refilled between
forwards. Memory that torch did not allocate never comes this far (see `eligible`). What remains is a kernel that writes into
saved memory in the middle of a forward and hides it from torch.

Note: [Owners of version counters]
A view has the counter of its base (`_base`): two tensors of one storage have the same counter for certain where their owner is
the same tensor, which is known by weak reference. `.data` makes an alias with a counter of its own, whose writes are not seen on
the other. `detach()` makes one that has the counter and does not say whose (ZeRO-3 hands each module a detached input): see
Note: [Addresses of version counters] in `counters`.

Note: [Detached inside of an operator]
Fused kernels write a gradient over their input, which no version shows, and save `input.detach()`: those bytes are not the ones
that another operator saved before. Such a tensor needs no gradient; the outputs that ZeRO-3 detaches do. Only those join.

Note: [Codecs and views]
A region that a codec encodes holds one saved tensor and nothing else, and only tensors of its dtype join: as another dtype its
bytes would come back changed, also those of a bool mask packed to bits.

Note: [Strided views]
A view that leaves gaps (a fused QKV projection, split: three views, each over 99% of one storage) becomes a region over the whole
storage where its own bytes are a fair part of it, and the next views join. Where they are a small part, their bytes are copied
together when they leave.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from ssdtrain.offload.counters import same_counter
from ssdtrain.offload.geometry import Geometry
from ssdtrain.offload.region import Region, Releases
from ssdtrain.offload.tape import Tape
from ssdtrain.offload.transfer_state import State

__all__ = ["Extent", "Regions", "no_overlap"]

# A view with gaps takes the whole storage along if at least this part of the storage is its own.
WHOLE_STORAGE = 0.2


class Extent(NamedTuple):
    """Bytes [start, end) of its storage that a tensor spans, and how many of them are its own."""

    start: int
    end: int
    own: int

    @staticmethod
    def of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Extent:
        itemsize = tensor.itemsize
        start = int(tensor.storage_offset()) * itemsize
        if tensor.is_contiguous():
            nbytes = tensor.numel() * itemsize
            return Extent(start, start + nbytes, nbytes)
        last = 0
        own = itemsize
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            last += (int(size) - 1) * int(stride)
            if stride:  # an expanded dimension has no bytes of its own
                own *= int(size)
        end = start + (last + 1) * itemsize
        return Extent(start, end, min(own, end - start))


class Regions:
    """The live regions by storage. Called with the engine's lock held."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], list[Region]]] = {}

    def find(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, extent: Extent, tape: Tape
    ) -> Region | None:
        """A region of `tape` whose bytes contain those of `tensor`, as they are now."""
        known = self._by_storage.get(id(storage))
        if known is None:
            return None
        if known[0]() is not storage:
            del self._by_storage[id(storage)]
            return None
        for region in known[1]:
            if (
                region.tape is tape
                and _contains(region, tensor, extent)
                and region.transfer.state is not State.RELEASED
                and not region.changed()
                and (
                    region.owner() is _owner(tensor)
                    # See Note: [Detached inside of an operator].
                    or (tensor.requires_grad and same_counter(region.probe, tensor))
                )
            ):
                return region
        return None

    def make(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        extent: Extent,
        tape: Tape,
        released: Releases,
    ) -> Region:
        """A new region for `tensor`: its extent, the whole storage, or its bytes alone. See Note: [Strided views]."""
        alias = tensor.detach()
        start, nbytes = extent.start, extent.end - extent.start
        thin = False
        if extent.own < nbytes:
            if extent.own >= WHOLE_STORAGE * storage.nbytes():
                start, nbytes = 0, storage.nbytes()
            elif extent.own < nbytes // 2 and no_overlap(tensor):
                start, nbytes, thin = 0, extent.own, True
        region = Region(alias, alias, start, nbytes, tape, released, weakref.ref(_owner(tensor)))
        if thin:
            region.origin = _origin(tensor)
        region.key = key = id(storage)
        known = self._by_storage.get(key)
        if known is None or known[0]() is not storage:
            known = self._by_storage[key] = (weakref.ref(storage), [])
        known[1].append(region)
        return region

    def forget(self, region: Region) -> None:
        """The region is released."""
        known = self._by_storage.get(region.key)
        if known is not None and region in known[1]:
            known[1].remove(region)
            if not known[1]:
                del self._by_storage[region.key]

    def forget_dead(self) -> None:
        """Drop the entries of storages that have died: their regions cannot be joined any more."""
        dead = [key for key, (storage, _) in self._by_storage.items() if storage() is None]
        for key in dead:
            del self._by_storage[key]


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counter `tensor` has. See Note: [Owners of version counters]."""
    base = tensor._base
    return tensor if base is None else base


def _origin(tensor: torch.Tensor) -> Geometry:
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _contains(region: Region, tensor: torch.Tensor, extent: Extent) -> bool:
    if region.origin is not None:
        return region.origin == _origin(tensor)
    if region.transfer.codec is not None and region.dtype is not tensor.dtype:
        return False  # see Note: [Codecs and views]
    itemsize = tensor.itemsize
    return (
        region.start <= extent.start
        and extent.end <= region.start + region.nbytes
        and region.start % itemsize == 0
        and extent.start % itemsize == 0
    )


def no_overlap(tensor: torch.Tensor) -> bool:
    """True if no two elements share an address, expanded dimensions aside."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
