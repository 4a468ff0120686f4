"""Kernels of codec `exact`; see Note: [Exact records] and Note: [Bases] in `ssdtrain.codecs.exact`.

One program encodes or decodes one superblock, each value read once but for exceptions. Places of exceptions are listed in
memory of the record or the tensor that is written later, so that one thread makes a byte of the pool of two. Shapes: R groups of
four blocks, W words of a block. A word has two 16-bit lanes, of values 2j and 2j + 1, and both are worked on at once. Numbers at
the end of names are those of the block in its group, or of the exception in its byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdtrain.codecs.base import Header, Pieces
from ssdtrain.codecs.kernels.block import signed
from ssdtrain.codecs.kernels.header import NOT_FINITE, OVERFLOW, write_header

# Numbers of the format, as in `ssdtrain.codecs.exact`.
_BLOCK, _GROUP, _GROUPS, _POOL = tl.constexpr(128), tl.constexpr(512), tl.constexpr(32), tl.constexpr(352)
_LEADS, _FRONT, _CODED, _WORDS = tl.constexpr(128), tl.constexpr(512), tl.constexpr(768), tl.constexpr(64)
_EXCEPTION, _FAR, _ABOVE_MEAN = tl.constexpr(14), tl.constexpr(15), tl.constexpr(8)
ENCODE_OPTIONS = {"num_warps": 16, "maxnreg": 64}
"""Launch options of encoding: where a thread has 64 registers, two programs run at once on a multiprocessor, one while the other
waits for memory."""
DECODE_OPTIONS = {"num_warps": 16}
_ANY_VALUE = ["skip", "groups", "behind", "header", "fingerprint", "values"]


@triton.jit
def _exponents(word: tl.tensor) -> tl.tensor:
    return (word >> 7) & 0x00FF00FF


@triton.jit
def _kept(word: tl.tensor) -> tl.tensor:
    return (word & 0x007F007F) | ((word >> 8) & 0x00800080)


@triton.jit
def _fifteen(top: tl.tensor) -> tl.tensor:
    """15 in each lane whose bit 15 is set; `top` has no other bits."""
    return (top >> 15) * 15


@triton.jit
def _lanes(sums_R: tl.tensor) -> tl.tensor:
    return ((sums_R & 0xFFFF) + (sums_R >> 16)).to(tl.int32)


@triton.jit
def _largest(exponent_RW: tl.tensor) -> tl.tensor:
    return (tl.max(tl.maximum(exponent_RW, exponent_RW << 16), axis=1) >> 16).to(tl.int32)


@triton.jit
def _base(exponent_RW: tl.tensor, largest_R: tl.tensor, sum_R: tl.tensor) -> tl.tensor:
    """The base of each block, whose exponents have this sum."""
    count_R = _lanes(tl.sum(((exponent_RW + 0x00FF00FF) >> 8) & 0x00010001, axis=1))
    return tl.minimum(largest_R, sum_R // tl.maximum(count_R, 1) + _ABOVE_MEAN)


@triton.jit
def _last(word: tl.tensor) -> tl.tensor:
    """The larger of two lanes, a negative value if there is one, in the high half."""
    return tl.maximum(word, word << 16)


@triton.jit
def _codes(word: tl.tensor, exponent_RW: tl.tensor, base_R: tl.tensor, lead_R: tl.tensor) -> tl.tensor:
    """Codes of two lanes. Bit 15 keeps lanes apart and says which are below zero."""
    first_R = base_R.to(tl.uint32) * 0x00010001 + 0x80008000
    below = first_R[:, None] - exponent_RW - ((word >> 15) & 0x00010001) * lead_R.to(tl.uint32)[:, None]
    inside = _fifteen(below & ((below - 0x000E000E) ^ 0x80008000) & 0x80008000)
    zero = _fifteen((0x80008000 - exponent_RW) & 0x80008000)
    return (below & inside) | (0x000E000E & (inside ^ 0x000E000E)) | zero


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
def _list(listed: tl.tensor, exceptions: tl.tensor, FURTHER: tl.constexpr) -> tl.tensor:
    """List the places of exceptions in their superblock, two bytes each, those behind a whole group `FURTHER` bytes further, and
    return how many there are. Round i lists the i-th of each word; few words have two."""
    R: tl.constexpr = exceptions.shape[0]
    first = (tl.arange(0, R) * _GROUP)[:, None] + (2 * tl.arange(0, _WORDS))[None, :]
    count_RW = _count(exceptions)
    rank_RW = _ranks(count_RW)
    for _ in range(tl.max(tl.max(count_RW, axis=1), axis=0)):
        lowest = exceptions & (0 - exceptions)
        shift = (lowest.to(tl.int32).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        place = first + (shift & 12) * (_BLOCK // 4) + (shift >> 4)
        slot = rank_RW + tl.where(rank_RW < _GROUP, 0, FURTHER // 2)
        some = (exceptions != 0) & (rank_RW < 2 * _POOL)
        tl.store(listed + slot, place.to(tl.uint16), mask=some)
        exceptions = exceptions & (exceptions - 1)
        rank_RW += 1
    return tl.sum(tl.sum(count_RW, axis=1), axis=0)


@triton.jit
def _listed(
    listed: tl.tensor, total: tl.tensor, FURTHER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Places of two exceptions a slot, and which there are."""
    slot = tl.arange(0, _FRONT)
    some0 = (slot < _POOL) & (2 * slot < total)
    some1 = (slot < _POOL) & (2 * slot + 1 < total)
    at = slot + tl.where(2 * slot < _GROUP, 0, FURTHER // 4)
    two = tl.load(listed.to(tl.pointer_type(tl.uint32), bitcast=True) + at, mask=some0, other=0)
    return (two & 0xFFFF).to(tl.int32), (two >> 16).to(tl.int32), some0, some1


@triton.jit
def _far(far0: tl.tensor, far1: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Number of exceptions whose exponents have a byte, and the places of these bytes in the pool."""
    count = far0.to(tl.int32) + far1.to(tl.int32)
    place = count - tl.cumsum(count, axis=0) + (_POOL - 1)
    return tl.sum(count, axis=0), place, place - far0.to(tl.int32)


@triton.jit
def _load_pairs(
    x: tl.tensor, at: tl.tensor, inside: tl.tensor, FLOAT32: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
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


@triton.jit
def _exception(
    start: tl.tensor, record: tl.tensor, place: tl.tensor, some: tl.tensor, FLOAT32: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Nibbles and exponents of the values at places of a superblock, whose bases and leads are in its record; 0 elsewhere."""
    halves = start.to(tl.pointer_type(tl.uint16), bitcast=True)
    at = 2 * place + 1 if FLOAT32 else place
    value = tl.load(halves + at, mask=some, other=0).to(tl.int32)
    base = tl.load(record + place // _BLOCK, mask=some, other=0).to(tl.int32)
    lead = tl.load(record + _LEADS + place // _GROUP, mask=some, other=0).to(tl.int32)
    exponent = (value >> 7) & 0xFF
    nibble = base - exponent - (value >> 15) * lead - _EXCEPTION
    nibble = tl.where((nibble < 0) | (nibble > _FAR), _FAR, nibble)
    return tl.where(some, nibble, 0), exponent


@triton.jit(do_not_specialize=_ANY_VALUE)
def _encode_kernel(
    x: tl.tensor,
    payload: tl.tensor,
    x_stride: tl.tensor,
    payload_stride: tl.tensor,
    skip: tl.tensor,
    groups: tl.tensor,
    behind: tl.tensor,
    header: tl.tensor,
    fingerprint: tl.tensor,
    values: tl.tensor,
    FLOAT32: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = 4 if FLOAT32 else 2
    GROUP_BYTES: tl.constexpr = _CODED + 1024 if FLOAT32 else _CODED
    piece = tl.program_id(1).to(tl.int64)
    x += (piece + tl.where(piece >= skip, 1, 0)) * x_stride
    payload += piece * payload_stride
    superblock = tl.program_id(0).to(tl.int64)
    record = payload + 16 + superblock * (_FRONT + _GROUPS * GROUP_BYTES)

    # 1. The values, bases and leads.
    group_R = tl.arange(0, _GROUPS)
    inside = (superblock * _GROUPS + group_R < groups)[:, None]
    word = tl.arange(0, _WORDS)[None, :]
    start = x + superblock * (_GROUPS * _GROUP * SIZE)
    at = group_R[:, None] * (4 * _WORDS) + word
    w0, l0 = _load_pairs(start, at, inside, FLOAT32)
    w1, l1 = _load_pairs(start, at + _WORDS, inside, FLOAT32)
    w2, l2 = _load_pairs(start, at + 2 * _WORDS, inside, FLOAT32)
    w3, l3 = _load_pairs(start, at + 3 * _WORDS, inside, FLOAT32)
    data = (record + _FRONT).to(tl.pointer_type(tl.uint32), bitcast=True) + group_R[:, None] * (
        GROUP_BYTES // 4
    )
    data += word
    if FLOAT32:
        tl.store(data + 3 * _WORDS, l0, mask=inside)
        tl.store(data + 4 * _WORDS, l1, mask=inside)
        tl.store(data + 5 * _WORDS, l2, mask=inside)
        tl.store(data + 6 * _WORDS, l3, mask=inside)
    last = tl.maximum(tl.maximum(_last(w0), _last(w1)), tl.maximum(_last(w2), _last(w3)))
    last_R = tl.max(last, axis=1)
    e0 = _exponents(w0)
    e1 = _exponents(w1)
    e2 = _exponents(w2)
    e3 = _exponents(w3)
    m0 = _largest(e0)
    m1 = _largest(e1)
    m2 = _largest(e2)
    m3 = _largest(e3)
    most = tl.max(tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)), axis=0)
    flags = tl.where(most == 255, NOT_FINITE, 0)
    b0, b1, b2, b3 = m0, m1, m2, m3
    s0 = _lanes(tl.sum(e0, axis=1))
    s1 = _lanes(tl.sum(e1, axis=1))
    s2 = _lanes(tl.sum(e2, axis=1))
    s3 = _lanes(tl.sum(e3, axis=1))
    # Where the largest exponent is not far above the mean of all, which zeros lower, it is the base.
    above01 = tl.maximum(m0 * _BLOCK - s0, m1 * _BLOCK - s1)
    above23 = tl.maximum(m2 * _BLOCK - s2, m3 * _BLOCK - s3)
    if tl.max(tl.maximum(above01, above23), axis=0) > _BLOCK * _ABOVE_MEAN:
        b0 = _base(e0, m0, s0)
        b1 = _base(e1, m1, s1)
        b2 = _base(e2, m2, s2)
        b3 = _base(e3, m3, s3)
    negative_R = tl.where(last_R > 0x7FFFFFFF, (last_R >> 23) & 0xFF, 0).to(tl.int32)
    lead_R = tl.maximum(tl.minimum(tl.minimum(b0, b1), tl.minimum(b2, b3)) - negative_R, 0)

    # 2. Codes, and what is kept of the values.
    codes = _codes(w0, e0, b0, lead_R) | (_codes(w1, e1, b1, lead_R) << 4)
    codes = codes | (_codes(w2, e2, b2, lead_R) << 8) | (_codes(w3, e3, b3, lead_R) << 12)
    kept01 = _kept(w0) | (_kept(w1) << 8)
    kept23 = _kept(w2) | (_kept(w3) << 8)

    # 3. The front but for the pool, and places of exceptions where the pool and the first group will be, and in the second group
    # behind as many as the first has values.
    FURTHER: tl.constexpr = _FRONT + GROUP_BYTES - (_FRONT - _POOL) - 2 * _GROUP
    pool = record + (_FRONT - _POOL)
    if superblock * _GROUPS < groups:  # fewer than 512 values have no record
        bases_R = b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)
        tl.store(record.to(tl.pointer_type(tl.int32), bitcast=True) + group_R, bases_R)
        tl.store(record + _LEADS + group_R, lead_R.to(tl.uint8))
        listed = pool.to(tl.pointer_type(tl.uint16), bitcast=True)
        total = _list(listed, _exceptions(codes), FURTHER)
        tl.debug_barrier()

        # 4. The pool: two exceptions a byte.
        place0, place1, some0, some1 = _listed(listed, total, FURTHER)
        nibble0, exponent0 = _exception(start, record, place0, some0, FLOAT32)
        nibble1, exponent1 = _exception(start, record, place1, some1, FLOAT32)
        far0 = nibble0 == _FAR
        far1 = nibble1 == _FAR
        far, end0, end1 = _far(far0, far1)
        tl.debug_barrier()  # the pool lies where places were
        slot = tl.arange(0, _FRONT)
        tl.store(pool + slot, (nibble0 | (nibble1 << 4)).to(tl.uint8), mask=slot + far < _POOL)
        tl.store(pool + end0, exponent0.to(tl.uint8), mask=far0 & (end0 >= 0))
        tl.store(pool + end1, exponent1.to(tl.uint8), mask=far1 & (end1 >= 0))
        flags = flags | tl.where((total + 1) // 2 + far > _POOL, OVERFLOW, 0)

    # 5. The groups.
    tl.store(data, kept01, mask=inside)
    tl.store(data + _WORDS, kept23, mask=inside)
    tl.store(data + 2 * _WORDS, codes, mask=inside)

    # 6. The first program copies what is behind the last group, with zeros up to a multiple of 16 bytes.
    if (tl.program_id(0) == 0) & (behind > 0):
        superblocks = (groups + _GROUPS - 1) // _GROUPS
        end = payload + 16 + superblocks.to(tl.int64) * _FRONT + groups.to(tl.int64) * GROUP_BYTES
        kind: tl.constexpr = tl.pointer_type(tl.int32) if FLOAT32 else tl.pointer_type(tl.int16)
        MAGNITUDE: tl.constexpr = 0x7F800000 if FLOAT32 else 0x7F80
        i = tl.arange(0, _GROUP)
        rest = x + groups.to(tl.int64) * (_GROUP * SIZE)
        value = tl.load(rest.to(kind, bitcast=True) + i, mask=i < behind, other=0)
        padded = (behind * SIZE + 15) // 16 * (16 // SIZE)
        tl.store(end.to(kind, bitcast=True) + i, value, mask=i < padded)
        special = (value & MAGNITUDE) == MAGNITUDE
        flags = flags | tl.where(tl.max(special.to(tl.int32), axis=0) != 0, NOT_FINITE, 0)
    write_header(payload, header, fingerprint, values, flags)


@triton.jit
def _merged(kept: tl.tensor, codes: tl.tensor, base_R: tl.tensor, lead_R: tl.tensor) -> tl.tensor:
    """Two lanes of values from the low bits of each lane, with the exponent 0 where that is the code or an exception."""
    code = codes & 0x000F000F
    above = (code + 0x00020002) & 0x00100010
    none = (above << 4) - (above >> 4)
    first_R = (base_R & 0xFF) * 0x00010001 + 0x01000100
    exponent = first_R[:, None] - ((kept >> 7) & 0x00010001) * lead_R[:, None] - code
    exponent = exponent & (none ^ 0x00FF00FF)
    return (kept & 0x007F007F) | ((kept & 0x00800080) << 8) | (exponent << 7)


@triton.jit
def _restored(
    record: tl.tensor,
    place: tl.tensor,
    nibble: tl.tensor,
    end: tl.tensor,
    some: tl.tensor,
    GROUP_BYTES: tl.constexpr,
) -> tl.tensor:
    """High halves of exceptions at places of a superblock; `end` is where in the pool those have their exponents whose nibble
    says so."""
    group = place // _GROUP
    block = (place // _BLOCK) & 3
    at = _FRONT + group * GROUP_BYTES + (block // 2) * (2 * _BLOCK) + (place & (_BLOCK - 1)) * 2 + (block & 1)
    kept = tl.load(record + at, mask=some, other=0).to(tl.int32)
    base = tl.load(record + place // _BLOCK, mask=some, other=0).to(tl.int32)
    lead = tl.load(record + _LEADS + group, mask=some, other=0).to(tl.int32)
    far = nibble == _FAR
    own = tl.load(record + (_FRONT - _POOL) + end, mask=some & far & (end >= 0), other=0).to(tl.int32)
    exponent = tl.where(far, own, base - (kept >> 7) * lead - _EXCEPTION - nibble)
    return ((kept & 0x7F) | ((kept & 0x80) << 8) | ((exponent & 0xFF) << 7)).to(tl.uint16)


@triton.jit(do_not_specialize=["groups"])
def _decode_kernel(body: tl.tensor, out: tl.tensor, groups: tl.tensor, FLOAT32: tl.constexpr) -> None:
    SIZE: tl.constexpr = 4 if FLOAT32 else 2
    GROUP_BYTES: tl.constexpr = _CODED + 1024 if FLOAT32 else _CODED
    superblock = tl.program_id(0).to(tl.int64)
    record = body + superblock * (_FRONT + _GROUPS * GROUP_BYTES)

    # 1. The record.
    group_R = tl.arange(0, _GROUPS)
    inside_R = superblock * _GROUPS + group_R < groups
    inside = inside_R[:, None]
    word = tl.arange(0, _WORDS)[None, :]
    data = (record + _FRONT).to(tl.pointer_type(tl.uint32), bitcast=True) + group_R[:, None] * (
        GROUP_BYTES // 4
    )
    data += word
    k01 = tl.load(data, mask=inside, other=0)
    k23 = tl.load(data + _WORDS, mask=inside, other=0)
    codes = tl.load(data + 2 * _WORDS, mask=inside, other=0)
    base_R = tl.load(record.to(tl.pointer_type(tl.uint32), bitcast=True) + group_R, mask=inside_R, other=0)
    lead_R = tl.load(record + _LEADS + group_R, mask=inside_R, other=0).to(tl.uint32)

    # 2. Places of exceptions, in memory of the tensor, and their values.
    start = out + superblock * (_GROUPS * _GROUP * SIZE)
    halves = start.to(tl.pointer_type(tl.uint16), bitcast=True)
    total = _list(halves, _exceptions(codes), 0)
    tl.debug_barrier()
    place0, place1, some0, some1 = _listed(halves, total, 0)
    slot = tl.arange(0, _FRONT)
    nibbles = tl.load(record + (_FRONT - _POOL) + slot, mask=some0, other=0).to(tl.int32)
    nibble0 = nibbles & 0xF
    nibble1 = tl.where(some1, nibbles >> 4, 0)
    _, end0, end1 = _far(nibble0 == _FAR, nibble1 == _FAR)
    value0 = _restored(record, place0, nibble0, end0, some0, GROUP_BYTES)
    value1 = _restored(record, place1, nibble1, end1, some1, GROUP_BYTES)
    tl.debug_barrier()

    # 3. The tensor, then exceptions.
    w0 = _merged(k01, codes, base_R, lead_R)
    w1 = _merged(k01 >> 8, codes >> 4, base_R >> 8, lead_R)
    w2 = _merged(k23, codes >> 8, base_R >> 16, lead_R)
    w3 = _merged(k23 >> 8, codes >> 12, base_R >> 24, lead_R)
    at = group_R[:, None] * (4 * _WORDS) + word
    _store_pairs(start, at, inside, w0, data + 3 * _WORDS, FLOAT32)
    _store_pairs(start, at + _WORDS, inside, w1, data + 4 * _WORDS, FLOAT32)
    _store_pairs(start, at + 2 * _WORDS, inside, w2, data + 5 * _WORDS, FLOAT32)
    _store_pairs(start, at + 3 * _WORDS, inside, w3, data + 6 * _WORDS, FLOAT32)
    tl.debug_barrier()
    high = SIZE // 2 - 1
    tl.store(halves + (place0 * (SIZE // 2) + high), value0, mask=some0)
    tl.store(halves + (place1 * (SIZE // 2) + high), value1, mask=some1)


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
    groups, behind = divmod(flat.numel(), _GROUP.value)
    _encode_kernel[(max(1, triton.cdiv(groups, _GROUPS.value)), count)](
        flat.view(torch.uint8), payload, x_stride, payload_stride, skip, groups, behind,
        header.word, signed(header.fingerprint), header.numel,
        FLOAT32=flat.dtype == torch.float32, **ENCODE_OPTIONS,
    )  # fmt: skip
    return True


def decode(body: Tensor, out: Tensor) -> None:
    """Decode into float32 or bfloat16 `out` [whole groups of 512]."""
    values = out if _aligned(out) else torch.empty_like(out)
    groups = out.numel() // _GROUP.value
    _decode_kernel[(triton.cdiv(groups, _GROUPS.value),)](
        body, values.view(torch.uint8), groups, FLOAT32=out.dtype == torch.float32, **DECODE_OPTIONS
    )
    if values is not out:
        out.copy_(values)
