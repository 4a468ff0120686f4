"""The codes of block float8 in Triton kernels (`ssdtrain.codecs.fp8`), in integers: not every GPU has the casts.

Shapes: R blocks per program, Q = block / 4 values per quarter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float8_code(
    v_RQ: tl.tensor, scale_R1: tl.tensor, finite_R1: tl.tensor, REACH: tl.constexpr, MANTISSA: tl.constexpr
) -> tl.tensor:
    """int32 bits of a float8 with MANTISSA bits, rounded to nearest even."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    SHIFT: tl.constexpr = 23 - MANTISSA
    y = tl.where(finite_R1, tl.div_rn(v_RQ, scale_R1 + tl.zeros_like(v_RQ)), 0.0)
    bits = tl.minimum(tl.maximum(y, -REACH * 1.0), REACH * 1.0).to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Adding 1.0 times 2^23 smallest steps rounds to a multiple of the smallest step.
    MAGIC: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
    magic = tl.full([1, 1], MAGIC, tl.int32).to(tl.float32, bitcast=True)
    small = (bits.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC
    return sign | tl.where(bits < ((128 - BIAS) << 23), small, normal)


@triton.jit
def float8_value(code: tl.tensor, MANTISSA: tl.constexpr) -> tl.tensor:
    """The inverse, float32, exact."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LARGEST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B
    magnitude = code & 0x7F
    step = tl.full([1, 1], (128 - BIAS - MANTISSA) << 23, tl.int32).to(tl.float32, bitcast=True)
    normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < (1 << MANTISSA), magnitude.to(tl.float32) * step, normal)
    value = tl.where(magnitude > LARGEST, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
