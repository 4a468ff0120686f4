"""Triton kernels of the Hadamard rotation (`ssdtrain.codecs.hadamard`): the butterflies of the reference, in its order.

Shapes: R blocks per program, B values per block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, int16

from ssdtrain.codecs.kernels.block import store

_VALUES_PER_PROGRAM = 4096


@triton.jit
def _butterflies(x_RB: tl.tensor, R: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr) -> tl.tensor:
    """Sums and differences of values 1, 2, 4, ... apart."""
    for stage in tl.static_range(STAGES):
        pairs = tl.trans(tl.reshape(x_RB, [R, B // (2 << stage), 2, 1 << stage]), 0, 1, 3, 2)
        a, b = tl.split(pairs)
        x_RB = tl.reshape(tl.trans(tl.join(a + b, a - b), 0, 1, 3, 2), [R, B])
    return x_RB


@triton.jit(do_not_specialize=["numel"])
def _rotate_kernel(
    x: tl.tensor,
    sign: tl.tensor,
    rotated: tl.tensor,
    unit: tl.tensor,
    numel: tl.tensor,
    padded: tl.tensor,
    R: tl.constexpr,
    B: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    place = tl.arange(0, B)[None, :]
    at = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None] * B + place
    if (tl.program_id(0).to(tl.int64) + 1) * (R * B) <= numel:  # without a mask the loads are vectors
        v_RB = tl.load(x + at).to(tl.float32)
    else:
        v_RB = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
    v_RB = v_RB * tl.load(sign + place) * unit
    tl.store(rotated + at, _butterflies(v_RB, R, B, STAGES), mask=at < padded)


@triton.jit(do_not_specialize=["numel"])
def _unrotate_kernel(
    rotated: tl.tensor,
    sign: tl.tensor,
    out: tl.tensor,
    unit: tl.tensor,
    numel: tl.tensor,
    padded: tl.tensor,
    R: tl.constexpr,
    B: tl.constexpr,
    STAGES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BFLOAT16: tl.constexpr,
) -> None:
    place = tl.arange(0, B)[None, :]
    at = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None] * B + place
    v_RB = tl.load(rotated + at, mask=at < padded, other=0.0) * unit
    v_RB = _butterflies(v_RB, R, B, STAGES) * tl.load(sign + place)
    store(out, at, numel, v_RB, ACCUMULATE, BFLOAT16)


def rotate(flat: Tensor, rotated: Tensor, signs: Tensor, unit: float) -> None:
    """Rotate `flat` [numel] into `rotated`, float32, padded to whole blocks."""
    B = signs.numel()
    R = _VALUES_PER_PROGRAM // B
    _rotate_kernel[(triton.cdiv(rotated.numel(), R * B),)](
        flat, signs, rotated, unit, flat.numel(), rotated.numel(),
        R=R, B=B, STAGES=B.bit_length() - 1, enable_fp_fusion=False,
    )  # fmt: skip


def unrotate(rotated: Tensor, out: Tensor, signs: Tensor, unit: float, accumulate: bool) -> None:
    """The inverse into `out` [numel], or onto it."""
    B = signs.numel()
    R = _VALUES_PER_PROGRAM // B
    _unrotate_kernel[(triton.cdiv(rotated.numel(), R * B),)](
        rotated, signs, out.view(int16) if out.dtype == bfloat16 else out, unit, out.numel(), rotated.numel(),
        R=R, B=B, STAGES=B.bit_length() - 1, ACCUMULATE=accumulate, BFLOAT16=out.dtype == bfloat16,
        enable_fp_fusion=False,
    )  # fmt: skip
