"""Exact: every bit at a size known before the call; exponents of bfloat16 and float32 in four bits.

Exponents of the values of a block lie close together, so four bits say how far below the block's largest one each lies, and
rare others stand in a pool. A bfloat16 takes 12.25 bits (0.766 of its bytes), a float32 28.25 (0.883). Other dtypes are copied:
float16 has an exponent of five bits, of which four bits would save one in sixteen.

Note: [Exact records]
    The body holds a record for each 16384 values (superblock; the last one may be shorter), then the values behind the last whole
    512, unchanged. A block is 128 values, so that it lies in one row of most matrices: rows differ more than their values do. A
    record:

        bytes 0-127     base of each block, an exponent
        bytes 128-159   lead of each four blocks: how far below their bases the exponents of their negative values begin
        bytes 160-511   pool: a nibble for each exception in the order of their codes, the first in the low bits; from its end
                        downwards the exponents of those whose nibble is 15, a byte each; zeros between
        768 per 4       of four blocks: sign and mantissa of values i of the first and the second, a byte each, for i = 0 .. 127;
        blocks          those of the third and the fourth; then the codes of values i of all four in two bytes, the first in the
                        low bits
        1024 per 4      float32 only, behind 768 bytes of its blocks: the low halves of the values; the high ones are a bfloat16
        blocks

    The distance of a value is the base, less the lead if the value is negative, minus its exponent. A code is the distance if
    that is 0 to 13, 15 if the exponent is 0 (zeros and denormals), else 14, an exception, whose nibble is the distance minus 14,
    or 15 where that is not 0 to 14. So values, bytes and codes are worked on as 16-bit lanes of whole blocks, two to a 32-bit
    word, and a record, read and written once, depends on no other.

Note: [Bases]
    The base is the largest exponent of the block, but no more than 8 above the mean of those that are not 0. An outlier that is
    2^14 times as large as the others (models above some billion parameters have some in the residual stream), an Inf or a NaN
    would make exceptions of the whole block. Exponents of ordinary values reach 3 above their mean.

    GELU leaves no negative value below -0.17, and of large negative ones next to nothing: their exponents spread over 25 binades
    that begin below those of the positive ones. The lead is the smallest base of four blocks minus the largest exponent of their
    negative values, 0 at least.

    A superblock whose exceptions take more than its pool sets the overflow flag of the header: such a payload does not hold the
    tensor. Room is for 4.3% of the values if they are up to 28 binades below their bases, else for 1.4%. 0.02% of normal values
    are exceptions. Of what three models save after 200 steps, GELU left most: 3.4% of a superblock. But a tensor may be anything.
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
GROUP = 4 * BLOCK
"""Values of four blocks, which a record keeps together."""
GROUPS = BLOCKS // 4
POOL_BYTES = 352
FRONT_BYTES = BLOCKS + GROUPS + POOL_BYTES
GROUP_BYTES = {torch.bfloat16: 768, torch.float32: 1792}
"""Bytes of four blocks by dtype; other dtypes are copied."""
EXCEPTION, ZERO = 14, 15
FAR_NIBBLE = 15
"""Nibble of an exception whose exponent has a byte of its own."""
ABOVE_MEAN = 8
"""Distance of the largest base from the mean exponent of a block."""
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
    negative = (high < 0).view(superblocks, 4 * groups, BLOCK)
    # 1. Bases, leads and codes.
    exponent = (high >> 7 & 0xFF).view(superblocks, 4 * groups, BLOCK)
    mean = exponent.sum(dim=2) // (exponent > 0).sum(dim=2).clamp(min=1)
    base = torch.minimum(exponent.amax(dim=2), mean + ABOVE_MEAN)
    of_negative = torch.where(negative, exponent, 0).view(superblocks, groups, GROUP).amax(dim=2)
    lead = (base.view(superblocks, groups, 4).amin(dim=2) - of_negative).clamp(min=0)
    distance = _first(base, lead, negative) - exponent
    code = torch.where((distance < 0) | (distance >= EXCEPTION), EXCEPTION, distance)
    code = torch.where(exponent == 0, ZERO, code).to(torch.int16)
    # 2. The front: bases, leads and pool.
    records[:, :FRONT_BYTES] = 0
    records[:, : 4 * groups] = base.to(torch.uint8)
    records[:, BLOCKS : BLOCKS + groups] = lead.to(torch.uint8)
    exception = _in_order(code == EXCEPTION)
    count = exception.cumsum(dim=1)
    nibble = _in_order(distance) - EXCEPTION
    nibble = torch.where((nibble < 0) | (nibble > FAR_NIBBLE), FAR_NIBBLE, nibble)
    nibbles = _listed(nibble, exception, 2 * POOL_BYTES)
    far = exception & (nibble == FAR_NIBBLE) & (count <= 2 * POOL_BYTES)
    exponents = _listed(_in_order(exponent), far, POOL_BYTES).flip(1)
    pool = torch.where(exponents > 0, exponents, nibbles[:, ::2] | nibbles[:, 1::2] << 4)
    records[:, BLOCKS + GROUPS : FRONT_BYTES] = pool
    # 3. The groups.
    data = records[:, FRONT_BYTES:].view(superblocks, groups, -1)
    kept = (high & 0x7F | high >> 8 & 0x80).chunk(4, dim=2)
    _write(data[:, :, :256], kept[0] | kept[1] << 8)
    _write(data[:, :, 256:512], kept[2] | kept[3] << 8)
    codes = code.view(superblocks, groups, GROUP).chunk(4, dim=2)
    _write(data[:, :, 512:768], codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12)
    if bits.dtype == torch.int32:
        _write(data[:, :, 768:], bits.to(torch.int16))
    taken = (count[:, -1] + 1) // 2 + far.sum(dim=1)
    return taken.amax() > POOL_BYTES


def _first(base_SB: Tensor, lead_SG: Tensor, negative_SBV: Tensor) -> Tensor:
    """[S, B, V]: the exponent at distance 0."""
    return base_SB[:, :, None] - lead_SG.repeat_interleave(4, dim=1)[:, :, None] * negative_SBV


def _listed(values_SV: Tensor, chosen_SV: Tensor, size: int) -> Tensor:
    """uint8 [S, size]: the chosen ones of each superblock in their order, as many as there is room for, then zeros."""
    slot = torch.where(chosen_SV, chosen_SV.cumsum(dim=1) - 1, size).clamp(max=size)
    listed = torch.zeros(len(slot), size + 1, dtype=torch.uint8, device=slot.device)
    listed.scatter_(1, slot, values_SV.to(torch.uint8))
    return listed[:, :size]  # the last took what is not listed


def _decode_records(records: Tensor, values_SGV: Tensor) -> None:
    superblocks, groups, _ = values_SGV.shape
    data = records[:, FRONT_BYTES:].view(superblocks, groups, -1)
    lanes = _read(data[:, :, 512:768])
    code = torch.cat([lanes >> shift & 0xF for shift in (0, 4, 8, 12)], dim=2)
    pairs = _read(data[:, :, :256]), _read(data[:, :, 256:512])
    kept = torch.cat([pair >> shift & 0xFF for pair in pairs for shift in (0, 8)], dim=2)
    base, lead = (records[:, a:b].to(torch.int16) for a, b in ((0, 4 * groups), (BLOCKS, BLOCKS + groups)))
    negative = (kept >= 0x80).view(superblocks, 4 * groups, BLOCK)
    first = _first(base, lead, negative).view(code.shape)
    # Exceptions in their order, then back in that of the values.
    pool = records[:, BLOCKS + GROUPS : FRONT_BYTES]
    nibbles = torch.stack([pool & 0xF, pool >> 4], dim=2).flatten(1)
    exception = _in_order(code == EXCEPTION)
    nibble = _taken(nibbles, exception)
    far = exception & (nibble == FAR_NIBBLE)
    rare = torch.where(far, _taken(pool.flip(1), far), _in_order(first) - EXCEPTION - nibble)
    rare = rare.view(superblocks, groups, BLOCK, 4).transpose(2, 3).reshape(code.shape)
    exponent = torch.where(code == EXCEPTION, rare, torch.where(code == ZERO, 0, first - code))
    high = kept & 0x7F | exponent << 7 | (kept & 0x80) << 8
    bits = _integers(values_SGV)
    if bits.dtype == torch.int32:
        bits.copy_(_read(data[:, :, 768:]).to(torch.int32) & 0xFFFF | high.to(torch.int32) << 16)
    else:
        bits.copy_(high)


def _taken(listed_SL: Tensor, chosen_SV: Tensor) -> Tensor:
    """int16 [S, V]: what `_listed` has of the chosen ones."""
    rank = (chosen_SV.cumsum(dim=1) - 1).clamp_(0, listed_SL.shape[1] - 1)
    return listed_SL.gather(1, rank).to(torch.int16)


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
