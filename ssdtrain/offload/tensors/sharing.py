"""Which saved tensors share a region.

Note: [Regions by storage]
Storages are known by weak reference (the meter's), never by address: an address is used again as soon as its storage dies. A
saved tensor joins a region of the same tape that contains its bytes and watches the same version counter.

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
bytes would come back changed, also those of a bool mask packed to bits. Where a codec of floats restores every bit, the region
may also be a whole storage of which the tensor is a view: of a fused QKV projection, a fifth of what a block saves.

Note: [Strided views]
A view that leaves gaps (a fused QKV projection, split: three views, each over 99% of one storage) becomes a region over the whole
storage where its own bytes are a fair part of it, and the next views join. Where they are a small part, their bytes are copied
together when they leave. So are those of a tensor that is no view for torch (`unsafe_chunk` in a GRU, what a kernel made of a
buffer of its own): its counter does not show writes into the gaps, which would be taken for writes into what was saved.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ssdtrain.offload.tensors.geometry import Geometry
from ssdtrain.offload.tensors.meter import Seen
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.state import TransferState
from ssdtrain.versions import same_counter

# A view with gaps takes the whole storage along if at least this part of the storage is its own.
WHOLE_STORAGE = 0.2


Extent = tuple[int, int, int]
"""Bytes [start, end) of its storage that a tensor spans, and how many of them are its own."""


class Geometries(dict[Geometry, tuple[Geometry, Extent, Geometry | None]]):
    """One copy of each geometry, with the extent of a tensor that has it, and with `Region.form` where it begins its storage and
    has no gaps: what backward holds of each is no object of its own."""

    KEPT = 1024

    def add(self, geometry: Geometry, tensor: torch.Tensor) -> tuple[Geometry, Extent, Geometry | None]:
        """Keep the geometry of `tensor`, and return what is known of it."""
        return self._add(geometry, extent_of(tensor))

    def _add(self, geometry: Geometry, extent: Extent) -> tuple[Geometry, Extent, Geometry | None]:
        if len(self) >= self.KEPT:
            self.clear()
        start, end, own = extent
        known = self[geometry] = geometry, extent, geometry if not start and own == end else None
        return known

    def within(self, region: Region, geometry: Geometry, extent: Extent) -> Geometry:
        """Return the geometry in its region of a tensor, whose offset is given in its storage."""
        if not region.start and region.origin is None:
            return geometry
        dtype, shape, stride, _ = geometry
        offset = 0 if region.origin is not None else (extent[0] - region.start) // dtype.itemsize
        geometry = dtype, shape, stride, offset
        start, end, own = extent
        first = offset * dtype.itemsize
        return (self.get(geometry) or self._add(geometry, (first, first + end - start, own)))[0]


def extent_of(tensor: torch.Tensor) -> Extent:
    """Return what `tensor` spans of its storage."""
    itemsize = tensor.itemsize
    start = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        nbytes = tensor.nbytes
        return start, start + nbytes, nbytes
    last = 0
    own = itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (int(size) - 1) * int(stride)
        if stride:  # an expanded dimension has no bytes of its own
            own *= int(size)
    end = start + (last + 1) * itemsize
    return start, end, min(own, end - start)


def find_region(seen: Seen, tensor: torch.Tensor, extent: Extent, tape: Tape) -> Region | None:
    """Return a region of `tape`, over the storage of `tensor`, whose bytes contain those of `tensor` as they are now."""
    base = tensor._base
    owner = tensor if base is None else base  # see Note: [Owners of version counters]
    for region in seen.regions:
        if (
            region.tape is tape
            and _contains(region, tensor, extent)
            and not region.changed()
            and (
                region.owner() is owner
                # See Note: [Detached inside of an operator].
                or (tensor.requires_grad and same_counter(region.probe, tensor))
            )
        ):
            return region
    return None


def make_region(
    seen: Seen,
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    geometry: Geometry,
    extent: Extent,
    form: Geometry | None,
    tape: Tape,
    operator: int,
    stream: Any | None,
) -> Region:
    """Return a new region for `tensor`: its extent, the whole storage, or its bytes alone. See Note: [Strided views]."""
    start, end, own = extent
    nbytes = end - start
    base, origin = tensor._base, None
    if form is None and own < nbytes:
        if base is not None and own >= WHOLE_STORAGE * storage.nbytes():
            start, nbytes = 0, storage.nbytes()
        elif (base is None or own < nbytes // 2) and no_overlap(tensor):
            start, nbytes, origin = 0, own, geometry
    owner = weakref.ref(tensor if base is None else base)  # see Note: [Owners of version counters]
    alias = tensor.detach()
    region = Region(
        alias, alias, start, nbytes, tape, alias._version, seen, len(tape.regions), operator, owner, geometry[0],
        storage.data_ptr(), TransferState(nbytes, nbytes), stream, form, origin,
    )  # fmt: skip
    seen.regions.append(region)
    return region


def _origin(tensor: torch.Tensor) -> Geometry:
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _contains(region: Region, tensor: torch.Tensor, extent: Extent) -> bool:
    if region.origin is not None:
        return region.origin == _origin(tensor)
    if region.transfer.codec is not None and region.dtype is not tensor.dtype:
        return False  # see Note: [Codecs and views]
    start, end, _ = extent
    return (
        region.start <= start
        and end <= region.start + region.nbytes
        and region.start % tensor.itemsize == 0  # as `start` is
    )


def no_overlap(tensor: torch.Tensor) -> bool:
    """Return True if no two elements share an address, expanded dimensions aside."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
