"""ZFP in one dimension at a fixed rate, bit for bit the stream of the reference library.

P. Lindstrom, "Fixed-rate compressed floating-point arrays" (IEEE TVCG 2014), and the library's own description of its bit stream
(zfp.readthedocs.io, "Algorithm"). Four consecutive values form a block: a common exponent, 30-bit integers, a lifted transform
along the block, negabinary, and then the bit planes from the top, each the bits of the coefficients already significant followed
by unary run-length groups, cut off after `rate * 4` bits.

It is here because the hybrid compression of arXiv 2409.02423 uses it. Neighbouring values of a gradient are not correlated, so
the integer codecs err less at the same number of bits.

Shapes: N blocks, W words of 32 bits that hold one block's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssdtrain.codecs import kernels, native
from ssdtrain.codecs.base import FixedSizeCodec, Key, write
from ssdtrain.codecs.zfp_tables import decode_table, encode_table

_MASK32 = 0xFFFFFFFF
_NEGABINARY = 0xAAAAAAAA
_BIAS = 127
_HEADER_BITS = 9  # not all zero, exponent
# The library widens a lower rate to the header, which its Python binding does not allow for.
_SMALLEST_BITS = _HEADER_BITS
_LONGEST_CODE = 7  # bits of one plane's


@dataclass(frozen=True)
class Zfp(FixedSizeCodec):
    """`rate` bits per value, a multiple of 1/4 from 2.25 to 32; float16 and bfloat16 are encoded as float32.

    Body: the stream of zfp_stream_set_rate(rate, float, 1 dimension, not aligned), 64-bit words.

    The format has no code for Inf and NaN. A block that holds one is written as "not all zero, exponent 0", a combination that no
    finite block has, and decodes to four NaN. Blocks below 2^-97 differ from the library's, whose scale factor overflows there;
    here they are encoded like all others.
    """

    unbiased = False  # planes that are cut off round towards zero
    # A block of one large and three small values may err by more than its norm at a low rate.
    contractive = False

    rate: float = 8.0
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        if not _SMALLEST_BITS <= 4 * self.rate <= 128 or 4 * self.rate != int(4 * self.rate):
            raise ValueError(
                f"rate={self.rate:g}: a zfp rate is a multiple of 0.25 from 2.25 to 32 bits per value"
            )

    @property
    def spec(self) -> str:
        return f"zfp:rate={self.rate:g}"

    @property
    def bits_per_value(self) -> float:
        return float(self.rate)

    @property
    def block_bits(self) -> int:
        return int(4 * self.rate)

    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        blocks = -(-numel // 4)
        return -(-blocks * self.block_bits // 64) * 8

    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor | bool:
        if native.usable(self.backend, flat, body):
            return native.zfp_encode(flat, body, self.block_bits)
        if kernels.usable(self.backend, flat, body):
            return kernels.zfp_encode(flat, body, self.block_bits)
        q_N4, exponent_N, finite_N = _to_integers(_blocks(flat))
        words_NW = _encode_planes(_negabinary(_lift(q_N4)), self.block_bits)
        header_N = torch.where(exponent_N > 0, 2 * exponent_N + 1, 0)
        words_NW.masked_fill_((exponent_N == 0)[:, None] | ~finite_N[:, None], 0)
        words_NW[:, 0] |= torch.where(finite_N, header_N, 1)
        stream = _join(words_NW, self.block_bits)
        body[: stream.numel()].copy_(stream)
        body[stream.numel() :].zero_()
        return finite_N.all()

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        if native.usable(self.backend, body, out):
            native.zfp_decode(body, out, self.block_bits, accumulate)
            return
        if kernels.usable(self.backend, body, out):
            kernels.zfp_decode(body, out, self.block_bits, accumulate)
            return
        words_NW = _split(body, -(-out.numel() // 4), self.block_bits)
        header_N = words_NW[:, 0] & (1 << _HEADER_BITS) - 1
        q_N4 = _unlift(_from_negabinary(_decode_planes(words_NW, self.block_bits)))
        exponent_N = header_N >> 1
        # Two roundings as in the library: the integer to float32, then the product.
        scale_N = torch.ldexp(torch.ones_like(header_N, dtype=torch.float64), exponent_N - _BIAS - 30)
        values_N4 = (q_N4.to(torch.float32).to(torch.float64) * scale_N[:, None]).to(torch.float32)
        values_N4 = torch.where((header_N & 1 == 1)[:, None], values_N4, 0.0)
        values_N4 = torch.where((header_N == 1)[:, None], torch.nan, values_N4)
        write(values_N4, out, accumulate)


def _blocks(flat: Tensor) -> Tensor:
    """float32 [N, 4]; a partial block repeats its values as the library's pad_block does (a, b, b, a)."""
    short = -flat.numel() % 4
    x = flat.to(torch.float32)
    if short:
        tail = x[-(4 - short) :]
        x = torch.cat([x, tail[[[], [0], [1, 0], [0, 0, 0]][short]]])
    return x.view(-1, 4)


def _to_integers(x_N4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [N, 4] in (-2^30, 2^30), biased exponents int64 [N] (0: all zero), finite bool [N]."""
    largest_N = x_N4.abs().amax(dim=1)
    finite_N = torch.isfinite(largest_N)
    x_N4 = torch.where(finite_N[:, None], x_N4, 0.0)
    largest_N = torch.where(finite_N, largest_N, 0.0)
    exponent_N = torch.frexp(largest_N.to(torch.float64))[1].to(torch.int64).clamp(min=1 - _BIAS)
    scale_N = torch.ldexp(torch.ones_like(largest_N, dtype=torch.float64), 30 - exponent_N)
    q_N4 = (x_N4.to(torch.float64) * scale_N[:, None]).to(torch.int64)
    return q_N4, torch.where(largest_N > 0, exponent_N + _BIAS, 0), finite_N


def _int32(x: Tensor) -> Tensor:
    """int64 that holds what 32-bit arithmetic would."""
    return ((x & _MASK32) ^ 0x80000000) - 0x80000000


def _lift(q_N4: Tensor) -> Tensor:
    x, y, z, w = q_N4.unbind(1)
    x = _int32(x + w) >> 1
    w = _int32(w - x)
    z = _int32(z + y) >> 1
    y = _int32(y - z)
    x = _int32(x + z) >> 1
    z = _int32(z - x)
    w = _int32(w + y) >> 1
    y = _int32(y - w)
    w = _int32(w + (y >> 1))
    y = _int32(y - (w >> 1))
    return torch.stack((x, y, z, w), dim=1)


def _unlift(q_N4: Tensor) -> Tensor:
    x, y, z, w = q_N4.unbind(1)
    y = _int32(y + (w >> 1))
    w = _int32(w - (y >> 1))
    y = _int32(y + w)
    w = _int32(_int32(w << 1) - y)
    z = _int32(z + x)
    x = _int32(_int32(x << 1) - z)
    y = _int32(y + z)
    z = _int32(_int32(z << 1) - y)
    w = _int32(w + x)
    x = _int32(_int32(x << 1) - w)
    return torch.stack((x, y, z, w), dim=1)


def _negabinary(q: Tensor) -> Tensor:
    return ((q + _NEGABINARY) & _MASK32) ^ _NEGABINARY


def _from_negabinary(u: Tensor) -> Tensor:
    return _int32((u ^ _NEGABINARY) - _NEGABINARY)


def _encode_planes(u_N4: Tensor, block_bits: int) -> Tensor:
    """int64 [N, W + 1] words of 32 bits, the header's bits zero, nothing behind `block_bits`."""
    code_table, length_table, count_table = encode_table().to(u_N4.device)
    weights = torch.tensor([1, 2, 4, 8], dtype=torch.int64, device=u_N4.device)
    words = u_N4.new_zeros(u_N4.shape[0], 128 // 32 + 2)
    at = torch.full_like(u_N4[:, 0], _HEADER_BITS)
    significant = torch.zeros_like(at)
    # Every plane has at least one bit, so no more planes than bits can be reached.
    for k in range(31, 31 - min(32, block_bits - _HEADER_BITS), -1):
        index = significant * 16 + ((u_N4 >> k & 1) * weights).sum(dim=1)
        left = (block_bits - at).clamp(min=0, max=_LONGEST_CODE)
        shifted = (code_table[index] & (1 << left) - 1) << (at & 31)
        word = (at >> 5).clamp(max=words.shape[1] - 2)
        words.scatter_add_(1, word[:, None], (shifted & _MASK32)[:, None])
        words.scatter_add_(1, word[:, None] + 1, (shifted >> 32)[:, None])
        at = at + length_table[index]
        significant = count_table[index]
    return words


def _decode_planes(words_NW: Tensor, block_bits: int) -> Tensor:
    """int64 [N, 4] negabinary numbers."""
    plane_table, length_table, count_table = decode_table().to(words_NW.device)
    positions = torch.arange(4, dtype=torch.int64, device=words_NW.device)
    u_N4 = words_NW.new_zeros(words_NW.shape[0], 4)
    at = torch.full_like(words_NW[:, 0], _HEADER_BITS)
    significant = torch.zeros_like(at)
    for k in range(31, 31 - min(32, block_bits - _HEADER_BITS), -1):
        word = (at >> 5)[:, None]
        pair = words_NW.gather(1, word) | words_NW.gather(1, word + 1) << 32
        left = (block_bits - at).clamp(max=_LONGEST_CODE)
        index = (significant * 8 + left) * 128 + (pair[:, 0] >> (at & 31) & 127)
        u_N4 |= (plane_table[index][:, None] >> positions & 1) << k
        at = at + length_table[index]
        significant = count_table[index]
    return u_N4


def _join(words_NW: Tensor, block_bits: int) -> Tensor:
    """uint8 stream of the first `block_bits` bits of every row, filled up with zeros to 64 bits."""
    place = torch.arange(block_bits, dtype=torch.int64, device=words_NW.device)
    bits = (words_NW[:, place >> 5] >> (place & 31) & 1).to(torch.uint8).view(-1)
    bits = torch.cat([bits, bits.new_zeros(-bits.numel() % 64)]).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def _split(body: Tensor, blocks: int, block_bits: int) -> Tensor:
    """The inverse of `_join`: int64 [N, W + 1]."""
    stream = body[: -(-blocks * block_bits // 8)]
    bits = (stream[:, None] >> torch.arange(8, dtype=torch.uint8, device=body.device) & 1).view(-1)
    bits_NB = bits[: blocks * block_bits].view(blocks, block_bits)
    bits_NB = torch.nn.functional.pad(bits_NB, (0, 128 + 64 - block_bits)).view(blocks, -1, 32)
    place = torch.arange(32, dtype=torch.int64, device=body.device)
    return (bits_NB.to(torch.int64) << place).sum(dim=2)
