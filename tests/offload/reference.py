"""The synchronous reference: every saved tensor is written to a file of its own at once, and read back when asked for.

No regions, no threads, no reuse, nothing clever: what the engine must agree with bit for bit. It shares no code with it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


class SynchronousOffload:
    """Saved-tensor hooks over plain files. Parameters are left alone, as are tensors that are no plain dense data."""

    def __init__(self, directory: Path, min_bytes: int) -> None:
        self.directory = directory
        self.min_bytes = min_bytes
        self.count = 0

    def pack(self, tensor: torch.Tensor) -> object:
        plain = type(tensor) is torch.Tensor and not tensor.is_conj()
        if isinstance(tensor, torch.nn.Parameter) or not plain or tensor.nbytes < self.min_bytes:
            return tensor if tensor.is_leaf else tensor.detach()
        path = self.directory / f"{self.count}.bin"
        self.count += 1
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = tensor.detach().as_strided((last + 1,), (1,), tensor.storage_offset())
        # Not by NumPy: a storage that it has seen cannot be resized by its owner any more.
        path.write_bytes(ctypes.string_at(span.data_ptr(), span.nbytes))
        return (path, tensor.dtype, tensor.shape, tensor.stride())

    def unpack(self, held: object) -> torch.Tensor:
        if isinstance(held, torch.Tensor):
            return held
        path, dtype, shape, stride = held
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype).as_strided(shape, stride)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
