"""Exact: every bit at a size known before the call; exponents of bfloat16 and float32 in four bits.

Exponents of the values of a block lie close together, so four bits say how far below the block's largest one each lies, and
rare others stand in a pool. A bfloat16 takes 12.25 bits (0.766 of its bytes), a float32 28.25 (0.883). Other dtypes are copied:
float16 has an exponent of five bits, of which four bits would save one in sixteen.

Note: [Exact records]
    The body holds a record for each 16384 values (superblock; the last one may be shorter), then the values behind the last whole
    512, unchanged. A block is 128 values, so that it lies in one row of most matrices: rows differ more than their values do. A
    record:

        bytes 0-127     base of each block, an exponent
        bytes 128-511   pool: exponents of exceptions in the order of their codes, then zeros
        768 per 4       of four blocks: sign and mantissa of values i of the first and the second, a byte each, for i = 0 .. 127;
        blocks          those of the third and the fourth; then the codes of values i of all four in two bytes, the first in the
                        low bits
        1024 per 4      float32 only, behind 768 bytes of its blocks: the low halves of the values; the high ones are a bfloat16
        blocks

    A code is the base minus the exponent if that is 0 to 13, 15 if the exponent is 0 (zeros and denormals), else 14, an
    exception. So values, bytes and codes are worked on as 16-bit lanes of whole blocks, two to a 32-bit word, and a record, read
    and written once, depends on no other.

Note: [Bases]
    The base is the largest exponent of the block. An outlier that is 2^14 times as large as the others (models above some billion
    parameters have some in the residual stream), an Inf or a NaN would make exceptions of the whole block. Therefore, where the
    exceptions of a superblock are more than its pool has bytes, blocks take a base among the exponents of most values instead if
    that leaves fewer exceptions: three above the smallest of the largest exponents of every 8 values in a row, of which those of
    zeros do not count.

    A superblock whose exceptions still are more than that sets the overflow flag of the header: such a payload does not hold the
    tensor. Then 2.3% of the values lie outside of the 14 binades of their blocks: 0.02% of normal values do, and 1% of products
    of a gate and a value (SwiGLU), which have the most of what training saves, but a tensor may be anything.
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

BLOCK = 128
BLOCKS = 128
"""Blocks of a superblock."""
POOL_BYTES = 384
FRONT_BYTES = BLOCKS + POOL_BYTES
GROUP = 4 * BLOCK
"""Values of four blocks, which a record keeps together."""
GROUPS = BLOCKS // 4
GROUP_BYTES = {torch.bfloat16: 768, torch.float32: 1792}
"""Bytes of four blocks by dtype; other dtypes are copied."""
EXCEPTION, ZERO = 14, 15
TYPICAL_ABOVE = 3
"""Distance of a typical base from the smallest of the largest exponents of every 8 values: of normal values that is at least the
largest exponent of their block."""
_AT_ONCE = 256
"""Superblocks that the reference works on together: its temporary tensors take some 30 times their bytes."""


@dataclass(frozen=True)
class Exact(ExactCodec, FixedSizeCodec):
    """Every bit of any dtype in 0.766 of the bytes of bfloat16, 0.883 of float32 and all of others; see Note: [Exact records].

    Args:
        backend: "auto", or one of "torch", "native", "triton" to insist on an implementation.
    """

    spec = "exact"
    inputs = PAYLOAD_DTYPES
    may_overflow = True
    bits_per_value = 8 * (FRONT_BYTES + GROUPS * GROUP_BYTES[torch.float32]) / (GROUPS * GROUP)

    backend: str = field(default="auto", compare=False)

    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        coded, nbytes = _coded(numel, dtype)
        return nbytes + (numel - coded) * dtype.itemsize

    def _encode_payload(
        self, flat: Tensor, payload: Tensor, header: Header, key: Key | None, pieces: Pieces | None = None
    ) -> bool:
        if flat.dtype not in GROUP_BYTES or native.usable(self.backend, flat, payload):
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
            for values_SGV, records in _superblocks(flat[:coded], body[:nbytes]):
                overflow = _encode_records(values_SGV, records) | overflow
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
            for values_SGV, records in _superblocks(values[:coded], body[:nbytes]):
                _decode_records(records, values_SGV)
        behind.copy_(body[nbytes : nbytes + behind.numel()])
        if accumulate:
            out.add_(values)


def _coded(numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """Number of values in records, and bytes of the records."""
    if dtype not in GROUP_BYTES:
        return 0, 0
    groups = numel // GROUP
    return groups * GROUP, -(-groups // GROUPS) * FRONT_BYTES + groups * GROUP_BYTES[dtype]


def _superblocks(flat: Tensor, body: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Values [S, G, 512] and records uint8 [S, bytes] of S superblocks of G groups: whole ones, some at a time, then the short
    one."""
    whole, groups = divmod(flat.numel() // GROUP, GROUPS)
    size, nbytes = GROUPS * GROUP, _coded(GROUPS * GROUP, flat.dtype)[1]
    for first in range(0, whole, _AT_ONCE):
        last = min(first + _AT_ONCE, whole)
        values, records = flat[first * size : last * size], body[first * nbytes : last * nbytes]
        yield values.view(-1, GROUPS, GROUP), records.view(last - first, -1)
    if groups:
        yield flat[whole * size :].view(1, groups, GROUP), body[whole * nbytes :].view(1, -1)


def _encode_records(values_SGV: Tensor, records: Tensor) -> Tensor:
    """Write `records`; returns whether a pool overflows, bool []."""
    superblocks, groups, _ = values_SGV.shape
    bits = _integers(values_SGV)
    high = bits if bits.dtype == torch.int16 else (bits >> 16).to(torch.int16)
    # 1. Bases and codes: typical bases only where the pool would not hold the exceptions otherwise.
    exponent = (high >> 7 & 0xFF).view(superblocks, 4 * groups, BLOCK)
    largest = exponent.amax(dim=2)
    exceptions = (_codes(exponent, largest) == EXCEPTION).sum(dim=2)
    typical = _typical_base(exponent, largest)
    fewer = (_codes(exponent, typical) == EXCEPTION).sum(dim=2) < exceptions
    full = exceptions.sum(dim=1, keepdim=True) > POOL_BYTES
    base = torch.where(full & fewer, typical, largest)
    code = _codes(exponent, base)
    # 2. The front: bases and pool.
    records[:, :FRONT_BYTES] = 0
    records[:, : 4 * groups] = base.to(torch.uint8)
    exception = _in_order(code == EXCEPTION)
    rank = exception.cumsum(dim=1) - 1
    pool = torch.zeros(superblocks, POOL_BYTES + 1, dtype=torch.uint8, device=records.device)
    slot = torch.where(
        exception & (rank < POOL_BYTES), rank, POOL_BYTES
    )  # the last takes what is not written
    pool.scatter_(1, slot, _in_order(exponent).to(torch.uint8))
    records[:, BLOCKS:FRONT_BYTES] = pool[:, :POOL_BYTES]
    # 3. The groups.
    data = records[:, FRONT_BYTES:].view(superblocks, groups, -1)
    kept = (high & 0x7F | high >> 8 & 0x80).chunk(4, dim=2)
    _write(data[:, :, :256], kept[0] | kept[1] << 8)
    _write(data[:, :, 256:512], kept[2] | kept[3] << 8)
    codes = code.view(superblocks, groups, GROUP).chunk(4, dim=2)
    _write(data[:, :, 512:768], codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12)
    if bits.dtype == torch.int32:
        _write(data[:, :, 768:], bits.to(torch.int16))
    return exception.sum(dim=1).amax() > POOL_BYTES


def _codes(exponent_SBV: Tensor, base_SB: Tensor) -> Tensor:
    below = base_SB[:, :, None] - exponent_SBV
    code = torch.where((below < 0) | (below >= EXCEPTION), EXCEPTION, below)
    return torch.where(exponent_SBV == 0, ZERO, code)


def _typical_base(exponent_SBV: Tensor, largest_SB: Tensor) -> Tensor:
    """[S, B]: above the exponents of most values, however large some outliers are."""
    every_8 = exponent_SBV.unflatten(2, (-1, 8)).amax(dim=3)
    smallest = torch.where(every_8 == 0, 255, every_8).amin(dim=2)
    return torch.minimum(smallest + TYPICAL_ABOVE, largest_SB)


def _decode_records(records: Tensor, values_SGV: Tensor) -> None:
    superblocks, groups, _ = values_SGV.shape
    data = records[:, FRONT_BYTES:].view(superblocks, groups, -1)
    lanes = _read(data[:, :, 512:768])
    code = torch.cat([lanes >> shift & 0xF for shift in (0, 4, 8, 12)], dim=2)
    base = records[:, : 4 * groups].to(torch.int16).repeat_interleave(BLOCK, dim=1).view(code.shape)
    pairs = _read(data[:, :, :256]), _read(data[:, :, 256:512])
    kept = torch.cat([pair >> shift & 0xFF for pair in pairs for shift in (0, 8)], dim=2)
    exception = _in_order(code == EXCEPTION)
    rank = (exception.cumsum(dim=1) - 1).clamp_(0, POOL_BYTES - 1)
    pooled = records[:, BLOCKS:FRONT_BYTES].gather(1, rank).to(torch.int16)
    pooled = pooled.view(superblocks, groups, BLOCK, 4).transpose(2, 3).reshape(code.shape)
    exponent = torch.where(code == EXCEPTION, pooled, torch.where(code == ZERO, 0, base - code))
    high = kept & 0x7F | exponent << 7 | (kept & 0x80) << 8
    bits = _integers(values_SGV)
    if bits.dtype == torch.int32:
        bits.copy_(_read(data[:, :, 768:]).to(torch.int32) & 0xFFFF | high.to(torch.int32) << 16)
    else:
        bits.copy_(high)


def _integers(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def _in_order(values: Tensor) -> Tensor:
    """[S, values] of a superblock in the order of the codes, of [S, ...]: value i of four blocks, then i + 1."""
    return values.view(values.shape[0], -1, 4, BLOCK).transpose(2, 3).flatten(1)


def _write(section: Tensor, lanes: Tensor) -> None:
    section.copy_(lanes.contiguous().view(torch.uint8))


def _read(section: Tensor) -> Tensor:
    """The 16-bit lanes of uint8 `section`."""
    return section.contiguous().view(torch.int16)
