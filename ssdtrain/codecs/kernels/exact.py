"""Kernels of codec `exact`; see Note: [Exact records] and Note: [Bases] in `ssdtrain.codecs.exact`.

One program encodes or decodes one superblock, each value read once. Shapes: R blocks of a superblock, W words of a quarter of a
block. A word has two 16-bit lanes, of values 2j and 2j + 1, and both are worked on at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdtrain.codecs.base import Header, Pieces
from ssdtrain.codecs.kernels.block import signed
from ssdtrain.codecs.kernels.header import NOT_FINITE, OVERFLOW, write_header

# Numbers of the format, as in `ssdtrain.codecs.exact`; words are those of a quarter of a block.
_BLOCK, _BLOCKS, _POOL = tl.constexpr(512), tl.constexpr(32), tl.constexpr(128)
_FRONT, _CODED, _WORDS = tl.constexpr(160), tl.constexpr(768), tl.constexpr(64)
_TYPICAL_ABOVE = tl.constexpr(3)
ENCODE_OPTIONS = {"num_warps": 16, "maxnreg": 64}
"""Launch options of encoding: where a thread has 64 registers, two programs run at once on a multiprocessor, one while the other
waits for memory."""
DECODE_OPTIONS = {"num_warps": 16}
_ANY_VALUE = ["skip", "blocks", "behind", "header", "fingerprint", "values"]


@triton.jit
def _exponents(word: tl.tensor) -> tl.tensor:
    return (word >> 7) & 0x00FF00FF


@triton.jit
def _kept(word: tl.tensor) -> tl.tensor:
    return (word & 0x007F007F) | ((word >> 8) & 0x00800080)


@triton.jit
def _fifteen(top: tl.tensor) -> tl.tensor:
    """15 in each lane whose bit 15 is set; `top` has no other bits."""
    return (top >> 11) - (top >> 15)


@triton.jit
def _codes(exponent: tl.tensor, base: tl.tensor) -> tl.tensor:
    """Codes of two lanes, `base` in both lanes. Bit 15 keeps lanes apart and says which are below zero."""
    below = base + 0x80008000 - exponent
    inside = _fifteen(below & ((below - 0x000E000E) ^ 0x80008000) & 0x80008000)
    zero = _fifteen((0x80008000 - exponent) & 0x80008000)
    return (below & inside) | (0x000E000E & (inside ^ 0x000E000E)) | zero


@triton.jit
def _packed_codes(e0: tl.tensor, e1: tl.tensor, e2: tl.tensor, e3: tl.tensor, base_R: tl.tensor) -> tl.tensor:
    base = (base_R * 0x00010001)[:, None]
    low = _codes(e0, base) | (_codes(e1, base) << 4)
    return low | (_codes(e2, base) << 8) | (_codes(e3, base) << 12)


@triton.jit
def _exceptions(codes: tl.tensor) -> tl.tensor:
    """One in the lowest bit of each code that is an exception."""
    code = codes ^ 0x11111111
    code = code & (code >> 1)
    return code & (code >> 2) & 0x11111111


@triton.jit
def _count(exceptions: tl.tensor) -> tl.tensor:
    return ((exceptions * 0x11111111) >> 28).to(tl.int32)


@triton.jit
def _ranks(count_RW: tl.tensor) -> tl.tensor:
    """Exceptions in front of each word."""
    count_R = tl.sum(count_RW, axis=1)
    before_R = tl.cumsum(count_R, axis=0) - count_R
    return before_R[:, None] + tl.cumsum(count_RW, axis=1) - count_RW


@triton.jit
def _load_pairs(x: tl.tensor, at: tl.tensor, inside: tl.tensor, FLOAT32: tl.constexpr) -> tl.tensor:
    """uint32 of the high halves of two values each, and of the low halves."""
    if FLOAT32:
        both = tl.load(x.to(tl.pointer_type(tl.uint64), bitcast=True) + at, mask=inside, other=0)
        high = ((both >> 16) & 0xFFFF) | ((both >> 32) & 0xFFFF0000)
        low = (both & 0xFFFF) | ((both >> 16) & 0xFFFF0000)
        return high.to(tl.uint32), low.to(tl.uint32)
    else:
        high = tl.load(x.to(tl.pointer_type(tl.uint32), bitcast=True) + at, mask=inside, other=0)
        return high, high


@triton.jit
def _store_pairs(
    out: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    high: tl.tensor,
    low_in: tl.tensor,
    FLOAT32: tl.constexpr,
) -> None:
    if FLOAT32:
        low = tl.load(low_in, mask=inside, other=0).to(tl.uint64)
        wide = high.to(tl.uint64)
        both = (low & 0xFFFF) | ((low & 0xFFFF0000) << 16)
        both = both | ((wide & 0xFFFF) << 16) | ((wide & 0xFFFF0000) << 32)
        tl.store(out.to(tl.pointer_type(tl.uint64), bitcast=True) + at, both, mask=inside)
    else:
        tl.store(out.to(tl.pointer_type(tl.uint32), bitcast=True) + at, high, mask=inside)


@triton.jit(do_not_specialize=_ANY_VALUE)
def _encode_kernel(
    x: tl.tensor,
    payload: tl.tensor,
    x_stride: tl.tensor,
    payload_stride: tl.tensor,
    skip: tl.tensor,
    blocks: tl.tensor,
    behind: tl.tensor,
    header: tl.tensor,
    fingerprint: tl.tensor,
    values: tl.tensor,
    FLOAT32: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = 4 if FLOAT32 else 2
    BLOCK_BYTES: tl.constexpr = _CODED + 1024 if FLOAT32 else _CODED
    piece = tl.program_id(1).to(tl.int64)
    x += (piece + tl.where(piece >= skip, 1, 0)) * x_stride
    payload += piece * payload_stride
    superblock = tl.program_id(0).to(tl.int64)
    record = payload + 16 + superblock * (_FRONT + _BLOCKS * BLOCK_BYTES)

    # 1. The values, what is kept of them, and the largest exponent of each block.
    block_R = tl.arange(0, _BLOCKS)
    inside = (superblock * _BLOCKS + block_R < blocks)[:, None]
    word = tl.arange(0, _WORDS)[None, :]
    start = x + superblock * (_BLOCKS * _BLOCK * SIZE)
    at = block_R[:, None] * (4 * _WORDS) + word
    w0, l0 = _load_pairs(start, at, inside, FLOAT32)
    w1, l1 = _load_pairs(start, at + _WORDS, inside, FLOAT32)
    w2, l2 = _load_pairs(start, at + 2 * _WORDS, inside, FLOAT32)
    w3, l3 = _load_pairs(start, at + 3 * _WORDS, inside, FLOAT32)
    data = (record + _FRONT).to(tl.pointer_type(tl.uint32), bitcast=True) + block_R[:, None] * (
        BLOCK_BYTES // 4
    )
    data += word
    tl.store(data, _kept(w0) | (_kept(w1) << 8), mask=inside)
    tl.store(data + _WORDS, _kept(w2) | (_kept(w3) << 8), mask=inside)
    if FLOAT32:
        tl.store(data + 3 * _WORDS, l0, mask=inside)
        tl.store(data + 4 * _WORDS, l1, mask=inside)
        tl.store(data + 5 * _WORDS, l2, mask=inside)
        tl.store(data + 6 * _WORDS, l3, mask=inside)
    e0 = _exponents(w0)
    e1 = _exponents(w1)
    e2 = _exponents(w2)
    e3 = _exponents(w3)
    upper = tl.maximum(tl.maximum(e0, e1), tl.maximum(e2, e3)) >> 16
    lower = tl.maximum(tl.maximum(e0 & 0xFF, e1 & 0xFF), tl.maximum(e2 & 0xFF, e3 & 0xFF))
    group_RW = tl.maximum(upper, lower)
    largest_R = tl.max(group_RW, axis=1)
    flags = tl.where(tl.max(largest_R, axis=0) == 255, NOT_FINITE, 0)

    # 2. Codes, with other bases where the pool is too small.
    base_R = largest_R
    codes = _packed_codes(e0, e1, e2, e3, base_R)
    exceptions = _exceptions(codes)
    count_RW = _count(exceptions)
    total = tl.sum(tl.sum(count_RW, axis=1), axis=0)
    if total > _POOL:
        smallest_R = tl.min(tl.where(group_RW == 0, 255, group_RW), axis=1)
        typical_R = tl.minimum(smallest_R + _TYPICAL_ABOVE, largest_R)
        others = _packed_codes(e0, e1, e2, e3, typical_R)
        fewer_R = tl.sum(_count(_exceptions(others)), axis=1) < tl.sum(count_RW, axis=1)
        base_R = tl.where(fewer_R, typical_R, largest_R)
        codes = tl.where(fewer_R[:, None], others, codes)
        exceptions = _exceptions(codes)
        count_RW = _count(exceptions)
        total = tl.sum(tl.sum(count_RW, axis=1), axis=0)
        flags = flags | tl.where(total > _POOL, OVERFLOW, 0)

    # 3. The record but for exceptions.
    pool = record + _BLOCKS
    slot = tl.arange(0, _POOL)
    if superblock * _BLOCKS < blocks:  # fewer than 512 values have no record
        tl.store(record + block_R, base_R.to(tl.uint8))
        tl.store(pool + slot, tl.zeros([_POOL], tl.uint8), mask=slot >= total)
    tl.store(data + 2 * _WORDS, codes, mask=inside)

    # 4. Exceptions: round i stores the i-th of each word, and few words have two. Their values are read again, which takes less
    # than to keep all of them in registers.
    if total > 0:
        rank_RW = _ranks(count_RW)
        halves = start.to(tl.pointer_type(tl.uint16), bitcast=True) + (at * SIZE + SIZE // 2 - 1)
        for _ in range(tl.max(tl.max(count_RW, axis=1), axis=0)):
            lowest = exceptions & (0 - exceptions)
            place = tl.where((lowest & 0x10101010) != 0, 2 * _WORDS, 0) + tl.where(lowest > 0xFFFF, 1, 0)
            place += tl.where((lowest & 0x11001100) != 0, 4 * _WORDS, 0)
            found = (exceptions != 0) & (rank_RW < _POOL)
            value = tl.load(halves + place * (SIZE // 2), mask=found, other=0)
            tl.store(pool + rank_RW, ((value >> 7) & 0xFF).to(tl.uint8), mask=found)
            exceptions = exceptions & (exceptions - 1)
            rank_RW += 1

    # 5. The first program copies what is behind the last block, with zeros up to a multiple of 16 bytes.
    if (tl.program_id(0) == 0) & (behind > 0):
        superblocks = (blocks + _BLOCKS - 1) // _BLOCKS
        end = payload + 16 + superblocks.to(tl.int64) * _FRONT + blocks.to(tl.int64) * BLOCK_BYTES
        kind: tl.constexpr = tl.pointer_type(tl.int32) if FLOAT32 else tl.pointer_type(tl.int16)
        MAGNITUDE: tl.constexpr = 0x7F800000 if FLOAT32 else 0x7F80
        i = tl.arange(0, _BLOCK)
        rest = x + blocks.to(tl.int64) * (_BLOCK * SIZE)
        value = tl.load(rest.to(kind, bitcast=True) + i, mask=i < behind, other=0)
        padded = (behind * SIZE + 15) // 16 * (16 // SIZE)
        tl.store(end.to(kind, bitcast=True) + i, value, mask=i < padded)
        special = (value & MAGNITUDE) == MAGNITUDE
        flags = flags | tl.where(tl.max(special.to(tl.int32), axis=0) != 0, NOT_FINITE, 0)
    write_header(payload, header, fingerprint, values, flags)


@triton.jit
def _merged(kept: tl.tensor, code: tl.tensor, base: tl.tensor) -> tl.tensor:
    """Two lanes of a value, with the exponent 0 where that is the code or an exception."""
    above = (code + 0x00020002) & 0x00100010
    none = (above << 4) - (above >> 4)
    exponent = (base + 0x01000100 - code) & (none ^ 0x00FF00FF)
    return (kept & 0x007F007F) | ((kept & 0x00800080) << 8) | (exponent << 7)


@triton.jit(do_not_specialize=["blocks"])
def _decode_kernel(body: tl.tensor, out: tl.tensor, blocks: tl.tensor, FLOAT32: tl.constexpr) -> None:
    SIZE: tl.constexpr = 4 if FLOAT32 else 2
    BLOCK_BYTES: tl.constexpr = _CODED + 1024 if FLOAT32 else _CODED
    superblock = tl.program_id(0).to(tl.int64)
    record = body + superblock * (_FRONT + _BLOCKS * BLOCK_BYTES)

    # 1. The record.
    block_R = tl.arange(0, _BLOCKS)
    inside = (superblock * _BLOCKS + block_R < blocks)[:, None]
    word = tl.arange(0, _WORDS)[None, :]
    data = (record + _FRONT).to(tl.pointer_type(tl.uint32), bitcast=True) + block_R[:, None] * (
        BLOCK_BYTES // 4
    )
    data += word
    k01 = tl.load(data, mask=inside, other=0)
    k23 = tl.load(data + _WORDS, mask=inside, other=0)
    codes = tl.load(data + 2 * _WORDS, mask=inside, other=0)
    base_R = tl.load(record + block_R, mask=superblock * _BLOCKS + block_R < blocks, other=0).to(tl.uint32)
    base = (base_R * 0x00010001)[:, None]

    # 2. The values but for exceptions.
    w0 = _merged(k01, codes & 0x000F000F, base)
    w1 = _merged(k01 >> 8, (codes >> 4) & 0x000F000F, base)
    w2 = _merged(k23, (codes >> 8) & 0x000F000F, base)
    w3 = _merged(k23 >> 8, (codes >> 12) & 0x000F000F, base)

    # 3. Exceptions, as they were stored.
    exceptions = _exceptions(codes)
    count_RW = _count(exceptions)
    rounds = tl.max(tl.max(count_RW, axis=1), axis=0)
    if rounds > 0:
        pool = record + _BLOCKS
        rank_RW = _ranks(count_RW)
        for _ in range(rounds):
            lowest = exceptions & (0 - exceptions)
            found = (exceptions != 0) & (rank_RW < _POOL)
            exponent = tl.load(pool + rank_RW, mask=found, other=0).to(tl.uint32)
            exponent = tl.where(lowest > 0xFFFF, exponent << 23, exponent << 7)
            w0 = w0 | tl.where((lowest & 0x00010001) != 0, exponent, 0)
            w1 = w1 | tl.where((lowest & 0x00100010) != 0, exponent, 0)
            w2 = w2 | tl.where((lowest & 0x01000100) != 0, exponent, 0)
            w3 = w3 | tl.where((lowest & 0x10001000) != 0, exponent, 0)
            exceptions = exceptions & (exceptions - 1)
            rank_RW += 1

    # 4. The tensor.
    start = out + superblock * (_BLOCKS * _BLOCK * SIZE)
    at = block_R[:, None] * (4 * _WORDS) + word
    _store_pairs(start, at, inside, w0, data + 3 * _WORDS, FLOAT32)
    _store_pairs(start, at + _WORDS, inside, w1, data + 4 * _WORDS, FLOAT32)
    _store_pairs(start, at + 2 * _WORDS, inside, w2, data + 5 * _WORDS, FLOAT32)
    _store_pairs(start, at + 3 * _WORDS, inside, w3, data + 6 * _WORDS, FLOAT32)


def _aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def encode(flat: Tensor, payload: Tensor, header: Header, pieces: Pieces | None = None) -> bool:
    """Encode float32 or bfloat16 `flat` [numel] into `payload`, header and flags included: one launch, after its first word is
    zeroed.

    Args:
        pieces: encode several pieces of the size of `flat`; None: `flat` alone.

    Returns:
        False if it was not done: pieces whose addresses are not multiples of 16 bytes.
    """
    count, x_stride, payload_stride, skip = pieces if pieces is not None else (1, 0, 0, 1)
    x_stride *= flat.itemsize
    if not _aligned(flat) or x_stride % 16:
        if pieces is not None:
            return False
        flat = flat.clone()
    payload.as_strided((count, 4), (payload_stride, 1)).zero_()
    blocks, behind = divmod(flat.numel(), _BLOCK.value)
    _encode_kernel[(max(1, triton.cdiv(blocks, _BLOCKS.value)), count)](
        flat.view(torch.uint8), payload, x_stride, payload_stride, skip, blocks, behind,
        header.word, signed(header.fingerprint), header.numel,
        FLOAT32=flat.dtype == torch.float32, **ENCODE_OPTIONS,
    )  # fmt: skip
    return True


def decode(body: Tensor, out: Tensor) -> None:
    """Decode into float32 or bfloat16 `out` [whole blocks]."""
    values = out if _aligned(out) else torch.empty_like(out)
    blocks = out.numel() // _BLOCK.value
    _decode_kernel[(triton.cdiv(blocks, _BLOCKS.value),)](
        body, values.view(torch.uint8), blocks, FLOAT32=out.dtype == torch.float32, **DECODE_OPTIONS
    )
    if values is not out:
        out.copy_(values)
