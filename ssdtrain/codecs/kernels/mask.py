"""Triton kernels of boolean masks (`ssdtrain.codecs.mask`): eight values to a byte, the first in the lowest bit.

Shapes: P bytes per program, of eight values each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BYTES_PER_PROGRAM = 1024


@triton.jit
def _pack_kernel(flat: tl.tensor, packed: tl.tensor, numel: tl.tensor, P: tl.constexpr) -> None:
    byte_P = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    bit_8 = tl.arange(0, 8)[None, :]
    at_P8 = byte_P[:, None] * 8 + bit_8
    value_P8 = tl.load(flat + at_P8, mask=at_P8 < numel, other=0).to(tl.int32)
    tl.store(packed + byte_P, tl.sum(value_P8 << bit_8, axis=1).to(tl.uint8), mask=byte_P * 8 < numel)


@triton.jit
def _unpack_kernel(packed: tl.tensor, out: tl.tensor, numel: tl.tensor, P: tl.constexpr) -> None:
    byte_P = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    bit_8 = tl.arange(0, 8)[None, :]
    at_P8 = byte_P[:, None] * 8 + bit_8
    byte = tl.load(packed + byte_P, mask=byte_P * 8 < numel, other=0).to(tl.int32)
    tl.store(out + at_P8, ((byte[:, None] >> bit_8) & 1).to(tl.uint8), mask=at_P8 < numel)


def pack(flat: Tensor, packed: Tensor) -> None:
    """Write bool `flat` [numel] to the bits of `packed` [numel / 8, rounded up]."""
    grid = (triton.cdiv(packed.numel(), _BYTES_PER_PROGRAM),)
    _pack_kernel[grid](flat.view(torch.uint8), packed, flat.numel(), P=_BYTES_PER_PROGRAM)


def unpack(packed: Tensor, out: Tensor) -> None:
    """Write the bits of `packed` to bool `out` [numel]."""
    grid = (triton.cdiv(packed.numel(), _BYTES_PER_PROGRAM),)
    _unpack_kernel[grid](packed, out.view(torch.uint8), out.numel(), P=_BYTES_PER_PROGRAM)
