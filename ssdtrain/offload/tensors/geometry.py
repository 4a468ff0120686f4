"""Tensors over given bytes: with the geometry that was saved, and with or without a version counter in common.

Note: [Alignment]
Kernels choose by the address in which order they sum: what begins at another place modulo a vector register, or a cache line, may
give other bits. So memory that a saved tensor comes back to has the address of the original modulo `ALIGNED`.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

ALIGNED = 64
"""Bytes: a cache line, and a vector register of AVX-512. Allocators of torch align to it, or to a multiple of it."""

# dtype, sizes, strides and storage offset (in elements of dtype) from the start of the region.
Geometry = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


def view_of(base: torch.Tensor, byte_offset: int, geometry: Geometry) -> torch.Tensor:
    """Return a tensor over the storage of `base` with exactly this geometry that is no view and shares `base`'s version counter.

    Args:
        base: any tensor over the storage.
        byte_offset: where the region begins in that storage, in bytes.
        geometry: of the saved tensor, relative to the region.
    """
    alias = base.detach()
    alias.data = tensor_over(base, geometry, byte_offset)
    return alias


def tensor_over(base: torch.Tensor, geometry: Geometry, byte_offset: int = 0) -> torch.Tensor:
    """Return the same as `view_of`, with a version counter of its own: where no other tensor lies in these bytes."""
    dtype, size, stride, offset = geometry
    typed = torch.empty(0, dtype=dtype, device=base.device)
    return typed.set_(base.untyped_storage(), byte_offset // dtype.itemsize + offset, size, stride)


def bytes_at(lead: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised memory (uint8) whose address is `lead` modulo `ALIGNED`.

    A storage of the CPU begins there: an address of the user may be no multiple of an element. That of a device begins before,
    and is the allocator's own, which has to know the streams that use it.
    """
    if not lead:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    block = torch.empty(nbytes + ALIGNED, dtype=torch.uint8, device=device)
    start = (lead - block.data_ptr()) % ALIGNED
    if device.type == "cpu":
        tensor: torch.Tensor = from_dlpack(to_dlpack(block[start : start + nbytes]))
        return tensor
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        block.untyped_storage(), start, (nbytes,), (1,)
    )


def lead_of(pointer: int, start: int, device: torch.device) -> int:
    """Return the `lead` of memory for what lay `start` bytes into a storage at `pointer`. See Note: [Alignment]."""
    # On a device a storage of the allocator holds it (`bytes_at`), whose offsets are whole elements of all views.
    return (pointer + start) % ALIGNED if device.type == "cpu" or not pointer % ALIGNED else 0


def place_of(base: torch.Tensor) -> int:
    """Return where the bytes of a region begin in the storage of `base` (uint8), which has nothing but them."""
    return int(base.storage_offset())


def restride(dense: torch.Tensor, geometry: Geometry, lead: int) -> torch.Tensor:
    """A tensor with the sizes and strides of `geometry` at an address of `lead` modulo `ALIGNED`, filled from the packed copy
    `dense` that `densest` made."""
    dtype, size, stride, _ = geometry
    elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    memory = bytes_at(lead, elements * dtype.itemsize, dense.device)
    tensor = tensor_over(memory, (dtype, size, stride, 0), place_of(memory))
    _own_elements(tensor).copy_(dense)
    return tensor


def densest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of the elements of `tensor`, expanded dimensions (stride 0) once."""
    return _own_elements(tensor.detach()).clone(memory_format=torch.contiguous_format)


def _own_elements(tensor: torch.Tensor) -> torch.Tensor:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
