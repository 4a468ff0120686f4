"""Tensors over given bytes: with the geometry that was saved, and with or without a version counter in common."""

from __future__ import annotations

import torch

__all__ = ["Geometry", "densest", "restride", "tensor_over", "view_of"]

# dtype, sizes, strides and storage offset (in elements of dtype) from the start of the region.
Geometry = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


def view_of(base: torch.Tensor, byte_offset: int, geometry: Geometry) -> torch.Tensor:
    """A tensor over the storage of `base` with exactly this geometry that is no view and shares `base`'s version counter.

    Args:
        base: any tensor over the storage.
        byte_offset: where the region begins in that storage, in bytes.
        geometry: of the saved tensor, relative to the region.
    """
    alias = base.detach()
    alias.data = tensor_over(base, geometry, byte_offset)
    return alias


def tensor_over(base: torch.Tensor, geometry: Geometry, byte_offset: int = 0) -> torch.Tensor:
    """As `view_of`, with a version counter of its own: where no other tensor lies in these bytes."""
    dtype, size, stride, offset = geometry
    typed = torch.empty(0, dtype=dtype, device=base.device)
    return typed.set_(base.untyped_storage(), byte_offset // dtype.itemsize + offset, size, stride)


def restride(dense: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A tensor with the sizes and strides of `geometry`, filled from the packed copy `dense` that `densest` made."""
    dtype, size, stride, _ = geometry
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=dense.device)
    _own_elements(tensor).copy_(dense)
    return tensor


def densest(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the elements of `tensor`, expanded dimensions (stride 0) once."""
    return _own_elements(tensor.detach()).clone(memory_format=torch.contiguous_format)


def _own_elements(tensor: torch.Tensor) -> torch.Tensor:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
