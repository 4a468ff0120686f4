"""Blocks of values that share a bfloat16 scale: the common parts of the integer and float8 codecs."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ssdtrain.codecs.base import align

BLOCK_SIZES = (32, 64, 128, 256)

# Kinds of codes, numbered as in the C implementation.
SYMMETRIC, ASYMMETRIC, E4M3, E5M2 = range(4)

# No scale is below this: the smallest normal number (twice that for asymmetric blocks, which halve it), so
# that a device that flushes denormals divides by the same scale as one that does not.
SMALLEST_SCALE = 2.0**-126

# Values beyond this, in the dtype that is encoded, are clipped to it. For float32 it is the largest bfloat16:
# a scale is a bfloat16, and a decoded value must not overflow where the value did not.
LARGEST = {
    torch.float32: float.fromhex("0x1.FEp127"),
    torch.bfloat16: float.fromhex("0x1.FEp127"),
    torch.float16: 65504.0,
}


class Rotation(NamedTuple):
    """A Hadamard rotation of every block: float32 signs [block], and 1 / sqrt(block)."""

    signs: Tensor
    unit: float


class BlockFormat(NamedTuple):
    """The format of a codec with a scale per block, as the C and Triton implementations take it."""

    block: int
    bits: int
    kind: int
    largest_code: float
    stochastic: bool = False

    @property
    def vectors(self) -> int:
        """bfloat16 numbers per block: a scale, and a zero point if the block is asymmetric."""
        return 2 if self.kind == ASYMMETRIC else 1


def check_block(block: int) -> None:
    if block not in BLOCK_SIZES:
        raise ValueError(f"block={block}: a block has {', '.join(map(str, BLOCK_SIZES))} values")


def split(flat: Tensor, block: int) -> Tensor:
    """float32 [blocks, block] of `flat` [numel]; the last block is filled up with the last value."""
    short = -flat.numel() % block
    if short:
        flat = torch.cat([flat, flat[-1:].expand(short)])
    return flat.to(torch.float32).view(-1, block)


def ceil_bf16(x: Tensor) -> Tensor:
    """The smallest bfloat16 >= x, as float32, for finite x >= 0."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def floor_bf16(x: Tensor) -> Tensor:
    """The largest bfloat16 <= x, as float32, for finite x."""
    bits = x.view(torch.int32)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).view(torch.float32)


@cache
def largest_scale(largest_code: float, source: torch.dtype) -> float:
    """The largest scale whose largest code does not overflow `source`."""
    quotient = torch.tensor([LARGEST[source] / largest_code], dtype=torch.float32, device="cpu")
    return float(floor_bf16(quotient)[0])


def write_bf16(section: Tensor, values: Tensor) -> None:
    """float32 `values` that are bfloat16 numbers or NaN. Not by a cast: torch's gives NaN other bits in vector loops than behind
    them."""
    section.view(torch.int16).copy_(values.view(torch.int32) >> 16)


def divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once. `x / number` is not that on CUDA, where torch multiplies by the reciprocal."""
    return x / torch.full_like(x, divisor)


def symmetric_scale(v_NB: Tensor, largest_code: float, source: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales of blocks whose codes reach from -largest_code to largest_code.

    A scale is rounded up to bfloat16, so no value lies outside the codes (clipping would bias stochastic
    rounding).

    Returns:
        float32 [N] scales, NaN where the block holds Inf or NaN, and bool [N], whether the block is finite.
    """
    amax = v_NB.abs().amax(dim=1)
    finite = torch.isfinite(amax)
    scale = ceil_bf16(divide(torch.where(finite, amax, 0.0), largest_code))
    scale = scale.clamp(SMALLEST_SCALE, largest_scale(largest_code, source))
    return torch.where(finite, scale, torch.nan), finite


def sections(numel: int, block: int, vectors: int, bits: int) -> tuple[int, int, int]:
    """Number of blocks, offset of the codes and size of the body in bytes, with `vectors` bfloat16 numbers
    per block."""
    blocks = -(-numel // block)
    codes = align(2 * vectors * blocks)
    return blocks, codes, codes + blocks * block * bits // 8


def check_counters(numel: int) -> None:
    """Refuse more values than one key has counters for: four values share one of 2^32."""
    if numel > (1 << 34) - max(BLOCK_SIZES):
        raise ValueError(f"{numel} values need more than 2^32 random counters: encode the tensor in slices")
