"""Exact: every bit at a size known before the call; exponents of bfloat16 and float32 in four bits.

Exponents of the values of a block lie close together, so four bits say how far below the block's largest one each lies, and
rare others stand in a pool. A bfloat16 takes 12.1 bits (0.755 of its bytes), a float32 28.1 (0.877). Other dtypes are copied:
float16 has an exponent of five bits, of which four bits would save one in sixteen.

Note: [Exact records]
    The body holds a record for each 16384 values (superblock; the last one may have fewer blocks), then the values behind the
    last whole block of 512, unchanged. A record:

        bytes 0-31      base of each block, an exponent
        bytes 32-159    pool: exponents of exceptions in the order of their codes, then zeros
        768 per block   sign and mantissa of values i and 128 + i, a byte each, for i = 0 .. 127; those of 256 + i and 384 + i;
                        then the codes of values i, 128 + i, 256 + i and 384 + i in two bytes, the first in the low bits
        1024 per block  float32 only, behind 768 bytes of its block: the low halves of the values; the high ones are a bfloat16

    A code is the base minus the exponent if that is 0 to 13, 15 if the exponent is 0 (zeros and denormals), else 14, an
    exception. So values, bytes and codes are worked on as 16-bit lanes of contiguous quarters of a block, two to a 32-bit word,
    and a record, read and written once, depends on no other.

Note: [Bases]
    The base is the largest exponent of the block. An outlier that is 2^14 times as large as the others (models above some billion
    parameters have some in the residual stream), an Inf or a NaN would make exceptions of the whole block. Therefore, where the
    exceptions of a superblock are more than its pool has bytes, blocks take a base among the exponents of most values instead if
    that leaves fewer exceptions: three above the smallest of the largest exponents of groups of 8 values, of which those of zeros
    do not count. Value 2j, 2j + 1 and those of the same place in other quarters are a group.

    A superblock whose exceptions still are more than that sets the overflow flag of the header: such a payload does not hold the
    tensor. Then one value in 128 lies outside of the 14 binades of its block; those of weights, gradients and activations are one
    in several hundred at most, but a tensor may be anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssdtrain.codecs import kernels, native
from ssdtrain.codecs.base import (
    PAYLOAD_DTYPES,
    ExactCodec,
    FixedSizeCodec,
    Header,
    HeaderFlag,
    HeaderFlags,
    Key,
    Pieces,
)
from ssdtrain.codecs.lossless import finite_flag

BLOCK = 512
BLOCKS = 32
"""Blocks of a superblock."""
POOL_BYTES = 128
FRONT_BYTES = BLOCKS + POOL_BYTES
BLOCK_BYTES = {torch.bfloat16: 768, torch.float32: 1792}
"""Bytes of a block by dtype; other dtypes are copied."""
EXCEPTION, ZERO = 14, 15
_AT_ONCE = 256
"""Superblocks that the reference works on together: its temporary tensors take some 30 times their bytes."""
TYPICAL_ABOVE = 3
"""Distance of a typical base from the smallest of the largest exponents of groups of 8 values: of normal values that is the
largest exponent of their block."""


@dataclass(frozen=True)
class Exact(ExactCodec, FixedSizeCodec):
    """Every bit of any dtype in 0.755 of the bytes of bfloat16, 0.877 of float32 and all of others; see Note: [Exact records].

    Args:
        backend: "auto", or one of "torch", "native", "triton" to insist on an implementation.
    """

    spec = "exact"
    inputs = PAYLOAD_DTYPES
    may_overflow = True
    bits_per_value = 8 * (FRONT_BYTES + BLOCKS * BLOCK_BYTES[torch.float32]) / (BLOCKS * BLOCK)

    backend: str = field(default="auto", compare=False)

    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        coded, nbytes = _coded(numel, dtype)
        return nbytes + (numel - coded) * dtype.itemsize

    def _encode_payload(
        self, flat: Tensor, payload: Tensor, header: Header, key: Key | None, pieces: Pieces | None = None
    ) -> bool:
        if flat.dtype not in BLOCK_BYTES or native.usable(self.backend, flat, payload):
            return False
        return kernels.usable(self.backend, flat, payload) and kernels.exact_encode(
            flat, payload, header, pieces
        )

    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> HeaderFlags:
        coded, nbytes = _coded(flat.numel(), flat.dtype)
        finite: HeaderFlag = finite_flag(flat[coded:], self.backend)
        overflow: HeaderFlag = False
        if coded and native.usable(self.backend, flat, body):
            records_finite, overflow = native.exact_encode(flat[:coded], body)
            finite = finite & records_finite
        elif coded:
            finite = finite & torch.isfinite(flat[:coded]).all()
            for values_SKB, records in _superblocks(flat[:coded], body[:nbytes]):
                overflow = _encode_records(values_SKB, records) | overflow
        behind = flat[coded:].view(torch.uint8)
        body[nbytes : nbytes + behind.numel()].copy_(behind)
        return finite, overflow

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        values = torch.empty_like(out) if accumulate else out
        coded, nbytes = _coded(out.numel(), out.dtype)
        behind = values[coded:].view(torch.uint8)
        if coded and native.usable(self.backend, body, out):
            native.exact_decode(body, values[:coded])
        elif coded and kernels.usable(self.backend, body, out):
            kernels.exact_decode(body, values[:coded])
        elif coded:
            for values_SKB, records in _superblocks(values[:coded], body[:nbytes]):
                _decode_records(records, values_SKB)
        behind.copy_(body[nbytes : nbytes + behind.numel()])
        if accumulate:
            out.add_(values)


def _coded(numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """Number of values in records, and bytes of the records."""
    if dtype not in BLOCK_BYTES:
        return 0, 0
    blocks = numel // BLOCK
    return blocks * BLOCK, -(-blocks // BLOCKS) * FRONT_BYTES + blocks * BLOCK_BYTES[dtype]


def _superblocks(flat: Tensor, body: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Values [S, K, 512] and records uint8 [S, bytes] of S superblocks of K blocks: whole ones, some at a time, then the
    partial one."""
    whole, blocks = divmod(flat.numel() // BLOCK, BLOCKS)
    size, nbytes = BLOCKS * BLOCK, _coded(BLOCKS * BLOCK, flat.dtype)[1]
    for first in range(0, whole, _AT_ONCE):
        last = min(first + _AT_ONCE, whole)
        values, records = flat[first * size : last * size], body[first * nbytes : last * nbytes]
        yield values.view(-1, BLOCKS, BLOCK), records.view(last - first, -1)
    if blocks:
        yield flat[whole * size :].view(1, blocks, BLOCK), body[whole * nbytes :].view(1, -1)


def _encode_records(values_SKB: Tensor, records: Tensor) -> Tensor:
    """Write `records`; returns whether a pool overflows, bool []."""
    superblocks, blocks, _ = values_SKB.shape
    bits = _integers(values_SKB)
    high = bits if bits.dtype == torch.int16 else (bits >> 16).to(torch.int16)
    exponent = high >> 7 & 0xFF
    # 1. Bases and codes: those of the outliers' blocks only where the pool would not hold the exceptions otherwise.
    largest = exponent.amax(dim=2)
    code = _codes(exponent, largest)
    exceptions = (code == EXCEPTION).sum(dim=2)
    typical = _typical_base(exponent, largest)
    fewer = (_codes(exponent, typical) == EXCEPTION).sum(dim=2) < exceptions
    full = exceptions.sum(dim=1, keepdim=True) > POOL_BYTES
    base = torch.where(full & fewer, typical, largest)
    code = _codes(exponent, base)
    # 2. The front: largest exponents and pool.
    records[:, :FRONT_BYTES] = 0
    records[:, :blocks] = base.to(torch.uint8)
    exception = _in_order(code == EXCEPTION)
    rank = exception.cumsum(dim=1) - 1
    pool = torch.zeros(superblocks, POOL_BYTES + 1, dtype=torch.uint8, device=records.device)
    slot = torch.where(
        exception & (rank < POOL_BYTES), rank, POOL_BYTES
    )  # the last takes what is not written
    pool.scatter_(1, slot, _in_order(exponent).to(torch.uint8))
    records[:, BLOCKS:FRONT_BYTES] = pool[:, :POOL_BYTES]
    # 3. The blocks.
    data = records[:, FRONT_BYTES:].view(superblocks, blocks, -1)
    kept = _quarters(high & 0x7F | high >> 8 & 0x80)
    _write(data[:, :, :256], kept[0] | kept[1] << 8)
    _write(data[:, :, 256:512], kept[2] | kept[3] << 8)
    codes = _quarters(code)
    _write(data[:, :, 512:768], codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12)
    if bits.dtype == torch.int32:
        _write(data[:, :, 768:], bits.to(torch.int16))
    return exception.sum(dim=1).amax() > POOL_BYTES


def _codes(exponent_SKB: Tensor, base_SK: Tensor) -> Tensor:
    below = base_SK[:, :, None] - exponent_SKB
    code = torch.where((below < 0) | (below >= EXCEPTION), EXCEPTION, below)
    return torch.where(exponent_SKB == 0, ZERO, code)


def _typical_base(exponent_SKB: Tensor, largest_SK: Tensor) -> Tensor:
    """[S, K]: above the exponents of most values, however large some outliers are."""
    groups = exponent_SKB.unflatten(2, (4, -1, 2)).amax(dim=(2, 4))
    smallest = torch.where(groups == 0, 255, groups).amin(dim=2)
    return torch.minimum(smallest + TYPICAL_ABOVE, largest_SK)


def _decode_records(records: Tensor, values_SKB: Tensor) -> None:
    superblocks, blocks, _ = values_SKB.shape
    base = records[:, :blocks, None].to(torch.int16)
    data = records[:, FRONT_BYTES:].view(superblocks, blocks, -1)
    lanes = _read(data[:, :, 512:768])
    code = torch.cat([lanes >> shift & 0xF for shift in (0, 4, 8, 12)], dim=2)
    pairs = _read(data[:, :, :256]), _read(data[:, :, 256:512])
    kept = torch.cat([half >> shift & 0xFF for half in pairs for shift in (0, 8)], dim=2)
    exception = _in_order(code == EXCEPTION)
    rank = (exception.cumsum(dim=1) - 1).clamp_(0, POOL_BYTES - 1)
    pooled = records[:, BLOCKS:FRONT_BYTES].gather(1, rank).to(torch.int16)
    pooled = pooled.view(superblocks, blocks, -1, 4).transpose(2, 3).reshape(code.shape)
    exponent = torch.where(code == EXCEPTION, pooled, torch.where(code == ZERO, 0, base - code))
    high = kept & 0x7F | exponent << 7 | (kept & 0x80) << 8
    bits = _integers(values_SKB)
    if bits.dtype == torch.int32:
        bits.copy_(_read(data[:, :, 768:]).to(torch.int32) & 0xFFFF | high.to(torch.int32) << 16)
    else:
        bits.copy_(high)


def _integers(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def _quarters(values_SKB: Tensor) -> tuple[Tensor, ...]:
    """Values i, 128 + i, 256 + i and 384 + i of each block, [S, K, 128] each."""
    return values_SKB.chunk(4, dim=2)


def _in_order(values_SKB: Tensor) -> Tensor:
    """[S, K * 512] in the order of the codes."""
    return values_SKB.unflatten(2, (4, -1)).transpose(2, 3).flatten(1)


def _write(section: Tensor, lanes: Tensor) -> None:
    """Write 16-bit `lanes` to uint8 `section`, whose address may be odd in the eyes of a view of another dtype."""
    section.copy_(lanes.contiguous().view(torch.uint8))


def _read(section: Tensor) -> Tensor:
    return section.contiguous().view(torch.int16)
