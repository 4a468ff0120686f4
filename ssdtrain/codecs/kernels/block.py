"""Triton kernels of block integers (`ssdtrain.codecs.block`, Note: [Block codes]) and block float8 (`ssdtrain.codecs.fp8`).

A program takes R blocks, and each block as four quarters: the four words of a Philox counter, the halves of
four-bit codes and the quarters of two-bit codes all fall on whole quarters. Launched without fused multiply-add;
divisions are rounded to nearest.

Shapes: R blocks per program, Q = block / 4 values per quarter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdtrain.codecs import scales
from ssdtrain.codecs.base import HEADER_BYTES, PAYLOAD_ALIGNMENT, Header, Key, Pieces
from ssdtrain.codecs.kernels.header import NOT_FINITE, write_header
from ssdtrain.codecs.scales import ASYMMETRIC, BlockFormat

_VALUES_PER_PROGRAM = 4096
# No compilation for each value: whether a number is 1 or a multiple of 16 makes no difference to the code.
_KEY_ARGUMENTS = ["seed_low", "seed_high", "step", "tensor", "tensor_stride", "rank"]
_ANY_VALUE = [*_KEY_ARGUMENTS, "skip", "numel", "blocks", "codes", "header", "fingerprint", "values"]
TENSOR_STRIDE = 0x9E3779B9
"""Difference of `Key.tensor` from one piece to the next."""


# The codes of block float8 in integers: not every GPU has the casts.


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


@triton.jit
def to_bfloat16_bits(x: tl.tensor) -> tl.tensor:
    """int16 bits of `x` rounded to nearest even. The interpreter's own cast truncates; NaN is kept apart
    because the one that GPUs make (all ones) would round to zero."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _ceil_bf16(x: tl.tensor) -> tl.tensor:
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _floor_bf16(x: tl.tensor) -> tl.tensor:
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _largest_bits(v_RQ: tl.tensor) -> tl.tensor:
    """The largest magnitude as bits, in whose order Inf and NaN come last."""
    return tl.max(v_RQ.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def _integer_code(
    v_RQ: tl.tensor,
    scale_R1: tl.tensor,
    zero_R1: tl.tensor,
    finite_R1: tl.tensor,
    word_RQ: tl.tensor,
    REACH: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> tl.tensor:
    """int32 codes; `word_RQ` are random words, unused in nearest rounding."""
    LOW: tl.constexpr = -REACH if SYMMETRIC else 0
    OFFSET: tl.constexpr = REACH + 1 if SYMMETRIC else 0
    if SYMMETRIC:
        y = tl.div_rn(v_RQ, scale_R1 + tl.zeros_like(v_RQ))
    else:
        y = tl.div_rn(v_RQ * 0.5 - zero_R1 * 0.5, scale_R1 * 0.5 + tl.zeros_like(v_RQ))
    y = tl.minimum(tl.maximum(y, LOW * 1.0), REACH * 1.0)
    if STOCHASTIC:
        whole = tl.floor(y)
        u = (word_RQ >> 8).to(tl.float32) * (1.0 / 16777216.0)
        q = whole + tl.where(u < y - whole, 1.0, 0.0)
    else:
        q = (y + 12582912.0) - 12582912.0  # to nearest even below 2^22
    return tl.where(finite_R1, q, 0.0).to(tl.int32) + OFFSET


@triton.jit(do_not_specialize=_ANY_VALUE)
def _encode_kernel(
    x: tl.tensor,
    payload: tl.tensor,
    x_stride: tl.tensor,
    payload_stride: tl.tensor,
    skip: tl.tensor,
    numel: tl.tensor,
    blocks: tl.tensor,
    codes: tl.tensor,
    header: tl.tensor,
    fingerprint: tl.tensor,
    values: tl.tensor,
    cap: tl.tensor,
    lowest: tl.tensor,
    seed_low: tl.tensor,
    seed_high: tl.tensor,
    step: tl.tensor,
    tensor: tl.tensor,
    tensor_stride: tl.tensor,
    rank: tl.tensor,
    Q: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    REACH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    ASYMMETRIC: tl.constexpr = KIND == 1
    piece = tl.program_id(1).to(tl.int64)
    source = piece + tl.where(piece >= skip, 1, 0)
    x += source * x_stride
    payload += piece * payload_stride
    scale_out = (payload + 16).to(tl.pointer_type(tl.int16), bitcast=True)
    code_out = payload + 16 + codes

    block_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside_R = block_R < blocks
    inside_R1 = inside_R[:, None]
    place = tl.arange(0, Q)[None, :]
    start = block_R[:, None] * (4 * Q) + place
    if (tl.program_id(0).to(tl.int64) + 1) * (R * 4 * Q) <= numel:  # without a mask the loads are vectors
        v0 = tl.load(x + start).to(tl.float32)
        v1 = tl.load(x + start + Q).to(tl.float32)
        v2 = tl.load(x + start + 2 * Q).to(tl.float32)
        v3 = tl.load(x + start + 3 * Q).to(tl.float32)
    else:  # the last block is filled up with the last value
        v0 = tl.load(x + tl.minimum(start, numel - 1)).to(tl.float32)
        v1 = tl.load(x + tl.minimum(start + Q, numel - 1)).to(tl.float32)
        v2 = tl.load(x + tl.minimum(start + 2 * Q, numel - 1)).to(tl.float32)
        v3 = tl.load(x + tl.minimum(start + 3 * Q, numel - 1)).to(tl.float32)

    largest_R = tl.maximum(
        tl.maximum(_largest_bits(v0), _largest_bits(v1)), tl.maximum(_largest_bits(v2), _largest_bits(v3))
    )
    finite_R = largest_R < 0x7F800000
    if not ASYMMETRIC:
        amax_R = tl.where(finite_R, largest_R, 0).to(tl.float32, bitcast=True)
        scale_R = _ceil_bf16(tl.div_rn(amax_R, tl.full([R], REACH, tl.float32)))
        scale_R = tl.minimum(tl.maximum(scale_R, 1.1754943508222875e-38), cap)
        zero_R = scale_R
    else:
        low_R = tl.minimum(
            tl.minimum(tl.min(v0, axis=1), tl.min(v1, axis=1)),
            tl.minimum(tl.min(v2, axis=1), tl.min(v3, axis=1)),
        )
        high_R = tl.maximum(
            tl.maximum(tl.max(v0, axis=1), tl.max(v1, axis=1)),
            tl.maximum(tl.max(v2, axis=1), tl.max(v3, axis=1)),
        )
        low_R = tl.where(finite_R, low_R, 0.0)
        high_R = tl.where(finite_R, high_R, 0.0)
        reach_R = tl.full([R], REACH, tl.float32)
        zero_R = _floor_bf16(tl.maximum(low_R, lowest) + 0.0)
        foot_R = tl.div_rn(zero_R, reach_R)
        spread_R = _ceil_bf16(tl.maximum(tl.div_rn(high_R, reach_R) - foot_R, 0.0))
        most_R = _floor_bf16(tl.maximum(tl.div_rn(tl.full([R], 0, tl.float32) + cap, reach_R) - foot_R, 0.0))
        scale_R = tl.maximum(tl.minimum(spread_R, most_R), 2.350988701644575e-38)
        zero_bits_R = tl.where(finite_R, zero_R.to(tl.int32, bitcast=True) >> 16, 0x7FC0)
        tl.store(scale_out + blocks + block_R, zero_bits_R.to(tl.int16), mask=inside_R)
    scale_bits_R = tl.where(finite_R, scale_R.to(tl.int32, bitcast=True) >> 16, 0x7FC0)
    tl.store(scale_out + block_R, scale_bits_R.to(tl.int16), mask=inside_R)
    finite = tl.min((finite_R | (block_R >= blocks)).to(tl.int32), axis=0)
    write_header(payload, header, fingerprint, values, tl.where(finite != 0, 0, NOT_FINITE))
    if tl.program_id(0) == 0:  # the zeros between scales and codes
        pad = 16 + (4 if ASYMMETRIC else 2) * blocks + tl.arange(0, 16)
        tl.store(payload + pad, tl.zeros([16], tl.uint8), mask=pad < 16 + codes)

    counter = (block_R[:, None] * Q + place).to(tl.uint32)
    w0 = counter
    w1 = counter
    w2 = counter
    w3 = counter
    if STOCHASTIC:
        zero = tl.zeros_like(counter)
        w0, w1, w2, w3 = tl.philox_impl(
            counter,
            zero + step.to(tl.uint32),
            zero + (tensor + source.to(tl.int32) * tensor_stride).to(tl.uint32),
            zero + rank.to(tl.uint32),
            zero + seed_low.to(tl.uint32),
            zero + seed_high.to(tl.uint32),
            n_rounds=10,
        )
    s = scale_R[:, None]
    z = zero_R[:, None]
    f = finite_R[:, None]
    if KIND >= 2:
        MANTISSA: tl.constexpr = 5 - KIND
        c0 = float8_code(v0, s, f, REACH, MANTISSA)
        c1 = float8_code(v1, s, f, REACH, MANTISSA)
        c2 = float8_code(v2, s, f, REACH, MANTISSA)
        c3 = float8_code(v3, s, f, REACH, MANTISSA)
    else:
        c0 = _integer_code(v0, s, z, f, w0, REACH, KIND == 0, STOCHASTIC)
        c1 = _integer_code(v1, s, z, f, w1, REACH, KIND == 0, STOCHASTIC)
        c2 = _integer_code(v2, s, z, f, w2, REACH, KIND == 0, STOCHASTIC)
        c3 = _integer_code(v3, s, z, f, w3, REACH, KIND == 0, STOCHASTIC)
    if BITS == 8:
        tl.store(code_out + start, c0.to(tl.uint8), mask=inside_R1)
        tl.store(code_out + start + Q, c1.to(tl.uint8), mask=inside_R1)
        tl.store(code_out + start + 2 * Q, c2.to(tl.uint8), mask=inside_R1)
        tl.store(code_out + start + 3 * Q, c3.to(tl.uint8), mask=inside_R1)
    elif BITS == 4:
        packed = block_R[:, None] * (2 * Q) + place
        tl.store(code_out + packed, (c0 | (c2 << 4)).to(tl.uint8), mask=inside_R1)
        tl.store(code_out + packed + Q, (c1 | (c3 << 4)).to(tl.uint8), mask=inside_R1)
    else:
        packed = block_R[:, None] * Q + place
        tl.store(code_out + packed, (c0 | (c1 << 2) | (c2 << 4) | (c3 << 6)).to(tl.uint8), mask=inside_R1)


@triton.jit
def store(
    out: tl.tensor,
    at: tl.tensor,
    numel: tl.tensor,
    value: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BFLOAT16: tl.constexpr,
) -> None:
    """Write float32 values to `out`, or add them."""
    inside = at < numel
    if ACCUMULATE:
        value = tl.load(out + at, mask=inside, other=0.0) + value
    if BFLOAT16:
        tl.store(out + at, to_bfloat16_bits(value), mask=inside)
    else:
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _write(
    out: tl.tensor,
    at: tl.tensor,
    numel: tl.tensor,
    code: tl.tensor,
    scale_R1: tl.tensor,
    zero_R1: tl.tensor,
    middle: tl.tensor,
    KIND: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BFLOAT16: tl.constexpr,
) -> None:
    if KIND >= 2:
        value = float8_value(code, 5 - KIND) * scale_R1
    elif KIND == 0:
        value = (code - middle).to(tl.float32) * scale_R1
    else:
        value = (zero_R1 * 0.5 + code.to(tl.float32) * (scale_R1 * 0.5)) * 2.0
    store(out, at, numel, value, ACCUMULATE, BFLOAT16)


@triton.jit(do_not_specialize=["blocks", "middle"])
def _decode_kernel(
    scale_in: tl.tensor,
    code_in: tl.tensor,
    out: tl.tensor,
    numel: tl.tensor,
    blocks: tl.tensor,
    middle: tl.tensor,
    Q: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BFLOAT16: tl.constexpr,
) -> None:
    block_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside_R = block_R < blocks
    inside_R1 = inside_R[:, None]
    place = tl.arange(0, Q)[None, :]
    bits_R = tl.load(scale_in + block_R, mask=inside_R, other=0).to(tl.int32) << 16
    scale = bits_R.to(tl.float32, bitcast=True)[:, None]
    zero = scale
    if KIND == 1:
        bits_R = tl.load(scale_in + blocks + block_R, mask=inside_R, other=0).to(tl.int32) << 16
        zero = bits_R.to(tl.float32, bitcast=True)[:, None]
    start = block_R[:, None] * (4 * Q) + place
    if BITS == 8:
        c0 = tl.load(code_in + start, mask=inside_R1, other=0).to(tl.int32)
        c1 = tl.load(code_in + start + Q, mask=inside_R1, other=0).to(tl.int32)
        c2 = tl.load(code_in + start + 2 * Q, mask=inside_R1, other=0).to(tl.int32)
        c3 = tl.load(code_in + start + 3 * Q, mask=inside_R1, other=0).to(tl.int32)
    elif BITS == 4:
        packed = block_R[:, None] * (2 * Q) + place
        a = tl.load(code_in + packed, mask=inside_R1, other=0).to(tl.int32)
        b = tl.load(code_in + packed + Q, mask=inside_R1, other=0).to(tl.int32)
        c0 = a & 15
        c1 = b & 15
        c2 = a >> 4
        c3 = b >> 4
    else:
        packed = block_R[:, None] * Q + place
        a = tl.load(code_in + packed, mask=inside_R1, other=0).to(tl.int32)
        c0 = a & 3
        c1 = (a >> 2) & 3
        c2 = (a >> 4) & 3
        c3 = a >> 6
    _write(out, start, numel, c0, scale, zero, middle, KIND, ACCUMULATE, BFLOAT16)
    _write(out, start + Q, numel, c1, scale, zero, middle, KIND, ACCUMULATE, BFLOAT16)
    _write(out, start + 2 * Q, numel, c2, scale, zero, middle, KIND, ACCUMULATE, BFLOAT16)
    _write(out, start + 3 * Q, numel, c3, scale, zero, middle, KIND, ACCUMULATE, BFLOAT16)


def signed(word: int) -> int:
    """The low 32 bits as a signed number, so that a kernel argument has one type whatever its value."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def encode(
    codec: BlockFormat,
    flat: Tensor,
    payload: Tensor,
    header: Header,
    key: Key | None,
    source: torch.dtype,
    pieces: Pieces | None = None,
) -> None:
    """Encode `flat` [numel] into `payload`, header and finite flag included: one launch, after 4 bytes, and those behind the
    codes, are zeroed.

    Args:
        source: dtype whose range limits the scales.
        pieces: encode several pieces of the size of `flat`; None: `flat` alone.
    """
    blocks, codes, end = scales.sections(flat.numel(), codec.block, codec.vectors, codec.bits)
    cap = scales.LARGEST[source]
    if codec.kind != ASYMMETRIC:
        cap = scales.largest_scale(codec.largest_code, source)
    key = key if key is not None else Key(0)
    rows = _VALUES_PER_PROGRAM // codec.block
    count, x_stride, payload_stride, skip = pieces if pieces is not None else (1, 0, 0, 1)
    first_words = payload.as_strided((count, 4), (payload_stride, 1))
    first_words.zero_()
    if behind := -end % PAYLOAD_ALIGNMENT:  # an odd number of blocks of 8 bytes
        at = payload.storage_offset() + HEADER_BYTES + end
        payload.as_strided((count, behind), (payload_stride, 1), at).zero_()
    _encode_kernel[(triton.cdiv(blocks, rows), count)](
        flat, payload, x_stride, payload_stride, skip, flat.numel(), blocks, codes,
        header.word, signed(header.fingerprint), header.numel, cap, -scales.largest_scale(1, source),
        signed(key.seed), signed(key.seed >> 32), signed(key.step), signed(key.tensor), signed(TENSOR_STRIDE), signed(key.rank),
        Q=codec.block // 4, R=rows, BITS=codec.bits, KIND=codec.kind, REACH=codec.largest_code, STOCHASTIC=codec.stochastic,
        enable_fp_fusion=False,
    )  # fmt: skip


def decode(codec: BlockFormat, body: Tensor, out: Tensor, accumulate: bool) -> None:
    """Decode into `out` [numel], or add to it.

    Note:
        The code of zero is an argument, although it follows from the number of bits: a difference from a constant becomes a sum
        of pairs of 16 bits, and where only the upper half of a pair is used (one value in bfloat16) ptxas 12.8 adds 0.
    """
    blocks, codes, end = scales.sections(out.numel(), codec.block, codec.vectors, codec.bits)
    rows = _VALUES_PER_PROGRAM // codec.block
    _decode_kernel[(triton.cdiv(blocks, rows),)](
        body[: 2 * blocks * codec.vectors].view(torch.int16), body[codes:end],
        out.view(torch.int16) if out.dtype == torch.bfloat16 else out, out.numel(), blocks,
        1 << (codec.bits - 1),
        Q=codec.block // 4, R=rows, BITS=codec.bits, KIND=codec.kind, ACCUMULATE=accumulate,
        BFLOAT16=out.dtype == torch.bfloat16, enable_fp_fusion=False,
    )  # fmt: skip
