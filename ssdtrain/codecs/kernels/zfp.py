"""Triton kernels of fixed-rate ZFP (`ssdtrain.codecs.zfp`): one lane per block of four values.

A block's code is kept as two 64-bit halves; the stream is put together by atomic ORs into 32-bit words, because
blocks of most rates do not end on a word. Powers of two are multiplied in halves, each exact, so no double precision is needed.

Shapes: R blocks per program.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdtrain.codecs import zfp_tables
from ssdtrain.codecs.kernels.block import store

_BLOCKS_PER_PROGRAM = 256


@triton.jit
def _power_of_two(exponent: tl.tensor) -> tl.tensor:
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """x * 2^exponent for |exponent| < 250, rounded once at most."""
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


@triton.jit
def _negabinary(q: tl.tensor) -> tl.tensor:
    mask = tl.full([1], 0xAAAAAAAA, tl.uint32)
    return (q.to(tl.uint32, bitcast=True) + mask) ^ mask


@triton.jit
def _from_negabinary(u: tl.tensor) -> tl.tensor:
    mask = tl.full([1], 0xAAAAAAAA, tl.uint32)
    return ((u ^ mask) - mask).to(tl.int32, bitcast=True)


@triton.jit
def _or_word(stream: tl.tensor, word: tl.tensor, value: tl.tensor, inside: tl.tensor) -> None:
    bits = (value & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(stream + word, bits, mask=inside & (bits != 0), sem="relaxed")


@triton.jit(do_not_specialize=["numel", "blocks"])
def _encode_kernel(
    x: tl.tensor,
    table: tl.tensor,
    finite_out: tl.tensor,
    stream: tl.tensor,
    numel: tl.tensor,
    blocks: tl.tensor,
    R: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    PLANES: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = block < blocks
    start = tl.minimum(block, blocks - 1) * 4
    count = numel - start
    # A partial block a, ab or abc becomes aaaa, abba or abca.
    x = x + start
    v0 = tl.load(x).to(tl.float32)
    v1 = tl.load(x + tl.where(count > 1, 1, 0)).to(tl.float32)
    v2 = tl.load(x + tl.where(count > 2, 2, tl.where(count > 1, 1, 0))).to(tl.float32)
    v3 = tl.load(x + tl.where(count > 3, 3, 0)).to(tl.float32)

    b0 = v0.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b1 = v1.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b2 = v2.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b3 = v3.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3))
    finite = largest < 0x7F800000
    biased = (largest >> 23) + 1  # denormal blocks share the exponent of the smallest normal ones
    shift = tl.where(finite, 157 - biased, 0)
    q0 = tl.where(finite, _scaled(v0, shift), 0.0).to(tl.int32)
    q1 = tl.where(finite, _scaled(v1, shift), 0.0).to(tl.int32)
    q2 = tl.where(finite, _scaled(v2, shift), 0.0).to(tl.int32)
    q3 = tl.where(finite, _scaled(v3, shift), 0.0).to(tl.int32)
    q0 = (q0 + q3) >> 1
    q3 = q3 - q0
    q2 = (q2 + q1) >> 1
    q1 = q1 - q2
    q0 = (q0 + q2) >> 1
    q2 = q2 - q0
    q3 = (q3 + q1) >> 1
    q1 = q1 - q3
    q3 = q3 + (q1 >> 1)
    q1 = q1 - (q3 >> 1)
    u0 = _negabinary(q0)
    u1 = _negabinary(q1)
    u2 = _negabinary(q2)
    u3 = _negabinary(q3)

    header = tl.where(finite, tl.where(largest > 0, 2 * biased + 1, 0), 1)
    coded = finite & (largest > 0)
    low = header.to(tl.uint64)
    high = tl.zeros_like(low)
    at = tl.full([R], 9, tl.int32)
    significant = tl.zeros_like(at)
    for i in range(PLANES):
        k = 31 - i
        plane = ((u0 >> k) & 1) | (((u1 >> k) & 1) << 1) | (((u2 >> k) & 1) << 2) | (((u3 >> k) & 1) << 3)
        entry = tl.load(table + significant * 16 + plane.to(tl.int32))  # code, length << 8, significant << 16
        left = tl.minimum(tl.maximum(BLOCK_BITS - at, 0), 8)
        code = (entry & ((1 << left) - 1) & 255).to(tl.uint64)
        code = tl.where(coded, code, 0)
        place = (at & 63).to(tl.uint64)
        above = at >= 64
        low = low | tl.where(above, 0, code << place)
        # The second shift is split in two: one by 64 is not defined.
        high = high | tl.where(above, code << place, (code >> 1) >> (63 - place))
        at = tl.minimum(at + ((entry >> 8) & 255), 120 + 8)
        significant = entry >> 16

    bit = block * BLOCK_BITS
    word = bit >> 5
    place = (bit & 31).to(tl.uint64)
    # The 128 bits of the code, shifted by less than 32, in three parts that overlap in no bit.
    middle = ((low >> 1) >> (63 - place)) | (high << place)
    top = (high >> 1) >> (63 - place)
    bottom = low << place
    _or_word(stream, word, bottom, inside)
    _or_word(stream, word + 1, bottom >> 32, inside)
    _or_word(stream, word + 2, middle, inside)
    _or_word(stream, word + 3, middle >> 32, inside)
    _or_word(stream, word + 4, top, inside)
    tl.atomic_and(finite_out, tl.min(tl.where(inside, finite, True).to(tl.int32), axis=0), sem="relaxed")


@triton.jit
def _word(stream: tl.tensor, word: tl.tensor, words: tl.tensor) -> tl.tensor:
    loaded = tl.load(stream + word, mask=word < words, other=0)
    return loaded.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _value(q: tl.tensor, header: tl.tensor, biased: tl.tensor) -> tl.tensor:
    value = tl.where((header & 1) == 1, _scaled(q.to(tl.float32), biased - 157), 0.0)
    return tl.where(header == 1, float("nan"), value)


@triton.jit(do_not_specialize=["numel", "words"])
def _decode_kernel(
    stream: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    numel: tl.tensor,
    words: tl.tensor,
    R: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    PLANES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BFLOAT16: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    bit = block * BLOCK_BITS
    word = bit >> 5
    place = (bit & 31).to(tl.uint64)
    first = _word(stream, word, words) | (_word(stream, word + 1, words) << 32)
    second = _word(stream, word + 2, words) | (_word(stream, word + 3, words) << 32)
    third = _word(stream, word + 4, words)
    low = (first >> place) | ((second << 1) << (63 - place))
    high = (second >> place) | ((third << 1) << (63 - place))

    header = (low & 511).to(tl.int32)
    at = tl.full([R], 9, tl.int32)
    significant = tl.zeros_like(at)
    u0 = tl.zeros([R], tl.uint32)
    u1 = tl.zeros([R], tl.uint32)
    u2 = tl.zeros([R], tl.uint32)
    u3 = tl.zeros([R], tl.uint32)
    for i in range(PLANES):
        k = 31 - i
        shift = (at & 63).to(tl.uint64)
        bits = tl.where(at >= 64, high >> shift, (low >> shift) | ((high << 1) << (63 - shift)))
        left = tl.minimum(tl.maximum(BLOCK_BITS - at, 0), 7)
        entry = tl.load(table + (significant * 8 + left) * 128 + (bits & 127).to(tl.int32))
        plane = (entry & 255).to(tl.uint32)
        u0 = u0 | ((plane & 1) << k)
        u1 = u1 | (((plane >> 1) & 1) << k)
        u2 = u2 | (((plane >> 2) & 1) << k)
        u3 = u3 | (((plane >> 3) & 1) << k)
        at = at + ((entry >> 8) & 255)
        significant = entry >> 16

    q0 = _from_negabinary(u0)
    q1 = _from_negabinary(u1)
    q2 = _from_negabinary(u2)
    q3 = _from_negabinary(u3)
    q1 = q1 + (q3 >> 1)
    q3 = q3 - (q1 >> 1)
    q1 = q1 + q3
    q3 = (q3 << 1) - q1
    q2 = q2 + q0
    q0 = (q0 << 1) - q2
    q1 = q1 + q2
    q2 = (q2 << 1) - q1
    q3 = q3 + q0
    q0 = (q0 << 1) - q3

    biased = header >> 1
    store(out, block * 4, numel, _value(q0, header, biased), ACCUMULATE, BFLOAT16)
    store(out, block * 4 + 1, numel, _value(q1, header, biased), ACCUMULATE, BFLOAT16)
    store(out, block * 4 + 2, numel, _value(q2, header, biased), ACCUMULATE, BFLOAT16)
    store(out, block * 4 + 3, numel, _value(q3, header, biased), ACCUMULATE, BFLOAT16)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 tables of `zfp_tables` packed into one number per entry: bits, length << 8, significant << 16."""
    encode_table, decode_table = (
        (t[0] | t[1] << 8 | t[2] << 16).to(torch.int32)
        for t in (zfp_tables.encode_table(), zfp_tables.decode_table())
    )
    return encode_table.to(device), decode_table.to(device)


def encode(flat: Tensor, body: Tensor, block_bits: int) -> Tensor:
    """Encode `flat` [numel] into `body`; returns whether every block is finite, bool []."""
    blocks = triton.cdiv(flat.numel(), 4)
    finite = torch.ones(1, dtype=torch.int32, device=flat.device)
    body.zero_()
    _encode_kernel[(triton.cdiv(blocks, _BLOCKS_PER_PROGRAM),)](
        flat, _tables(flat.device)[0], finite, body.view(torch.int32), flat.numel(), blocks,
        R=_BLOCKS_PER_PROGRAM, BLOCK_BITS=block_bits, PLANES=min(32, block_bits - 9), enable_fp_fusion=False,
    )  # fmt: skip
    return finite[0] == 1


def decode(body: Tensor, out: Tensor, block_bits: int, accumulate: bool) -> None:
    """Decode into `out` [numel], or add to it."""
    _decode_kernel[(triton.cdiv(triton.cdiv(out.numel(), 4), _BLOCKS_PER_PROGRAM),)](
        body[: body.numel() // 4 * 4].view(torch.int32), _tables(out.device)[1],
        out.view(torch.int16) if out.dtype == torch.bfloat16 else out, out.numel(), body.numel() // 4,
        R=_BLOCKS_PER_PROGRAM, BLOCK_BITS=block_bits, PLANES=min(32, block_bits - 9),
        ACCUMULATE=accumulate, BFLOAT16=out.dtype == torch.bfloat16, enable_fp_fusion=False,
    )  # fmt: skip
