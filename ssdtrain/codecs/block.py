"""Integers of 8, 4 or 2 bits in blocks that share a scale.

Shapes: N blocks, B values per block.

Note: [Block codes]
    Body: bfloat16 scales [N]; for asymmetric blocks bfloat16 zero points [N]; zeros up to a multiple of 16
    bytes; codes, bits * B / 8 bytes per block; zeros up to a multiple of 16. A code is unsigned.
    Two four-bit codes that share a byte are B/2 apart in their block (the earlier one in the low bits), four
    two-bit codes B/4 apart: contiguous halves and quarters, so that packing is the same operation on whole
    vectors.

    symmetric:   value = (code - 2^(bits-1)) * scale,  codes 1 .. 2^bits - 1
    asymmetric:  value = zero + code * scale,          codes 0 .. 2^bits - 1

    Scales are rounded up and zero points down to bfloat16, so every value lies within the codes.
"""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssdtrain.codecs import kernels, native, scales
from ssdtrain.codecs.base import FixedSizeCodec, Header, Key, Pieces, write
from ssdtrain.codecs.philox import uniform_blocks

ROUNDINGS = ("nearest", "stochastic")


class BlockCodec(FixedSizeCodec):
    """A codec of blocks that share a scale: C in host memory, Triton on CUDA, or the reference."""

    block: int
    backend: str

    @property
    @abstractmethod
    def block_format(self) -> scales.BlockFormat:
        """The format, as the C and Triton implementations take it."""

    @property
    def bits_per_value(self) -> float:
        return self.block_format.bits + 16 * self.block_format.vectors / self.block

    def check_key(self, key: Key | None, numel: int) -> None:
        """Refuse stochastic rounding without a key, and more values than one key has counters for."""
        if not self.block_format.stochastic:
            return
        if key is None:
            raise ValueError(f"{self.spec} rounds stochastically and needs a Key(seed, step, tensor, rank)")
        scales.check_counters(numel)

    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        layout = self.block_format
        return scales.sections(numel, self.block, layout.vectors, layout.bits)[2]

    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor | bool:
        self.check_key(key, flat.numel())
        if native.usable(self.backend, flat, body):
            return native.block_encode(self.block_format, flat, body, key)
        return self._encode_reference(flat, body, key)

    def _encode_payload(
        self, flat: Tensor, payload: Tensor, header: Header, key: Key | None, pieces: Pieces | None = None
    ) -> bool:
        if native.usable(self.backend, flat, payload) or not kernels.usable(self.backend, flat, payload):
            return False
        self.check_key(key, flat.numel())
        kernels.block_encode(self.block_format, flat, payload, header, key, flat.dtype, pieces)
        return True

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        if native.usable(self.backend, body, out):
            native.block_decode(self.block_format, body, out, accumulate)
        elif kernels.usable(self.backend, body, out):
            kernels.block_decode(self.block_format, body, out, accumulate)
        else:
            self._decode_reference(body, out, accumulate)

    @abstractmethod
    def _encode_reference(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor: ...

    @abstractmethod
    def _decode_reference(self, body: Tensor, out: Tensor, accumulate: bool) -> None: ...


@dataclass(frozen=True)
class IntBlock(BlockCodec):
    """Block quantisation to integers.

    Range: values above LARGEST of their dtype (scales.py) are clipped to it, less than 0.8%; no step is below
    2^-126 (asymmetric: 2^-125), so magnitudes around and below that are coarse. Within this range, with scale
    s, nearest rounding errs by at most s/2 per value, stochastic rounding by less than s with variance at
    most s^2/4.

    Args:
        bits: 8, 4 or 2.
        block: values per scale.
        rounding: "nearest" (half to even) or "stochastic", which is unbiased and needs a key.
        symmetric: whether zero is a code and the range is symmetric around it.
        backend: "auto", or one of "torch", "native", "triton" to insist on an implementation.
    """

    bits: int
    block: int = 128
    rounding: str = "nearest"
    symmetric: bool = True
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        scales.check_block(self.block)
        if self.bits not in (8, 4, 2):
            raise ValueError(f"bits={self.bits}: integer codes have 8, 4 or 2 bits")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"round={self.rounding}: rounding is {' or '.join(ROUNDINGS)}")

    @property
    def spec(self) -> str:
        options = [f"block={self.block}"]
        if self.stochastic:
            options.append("round=stochastic")
        if not self.symmetric:
            options.append("asymmetric")
        return f"int{self.bits}:{','.join(options)}"

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def largest_code(self) -> int:
        """Codes in one direction from zero (symmetric) or from the zero point (asymmetric)."""
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    @property
    def contractive(self) -> bool:
        """Nearest symmetric codes contract because zero is a code: no value moves further than its own
        magnitude. Elsewhere the worst block has B errors of s/2 (in the mean) against one value at the end of
        the range."""
        if self.symmetric and not self.stochastic:
            return True
        slack = 1 + 2.0**-6  # rounding of the scale and the zero point
        reach = 1 if self.symmetric else 2  # an asymmetric block spans up to twice its largest magnitude
        step = slack * reach / self.largest_code
        return self.block * step**2 / 4 < 1

    @property
    def vectors(self) -> int:
        """bfloat16 numbers per block: a scale, and a zero point where the block is asymmetric."""
        return 1 if self.symmetric else 2

    @property
    def block_format(self) -> scales.BlockFormat:
        kind = scales.SYMMETRIC if self.symmetric else scales.ASYMMETRIC
        return scales.BlockFormat(self.block, self.bits, kind, self.largest_code, self.stochastic)

    def _encode_reference(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor:
        blocks, codes, end = scales.sections(flat.numel(), self.block, self.vectors, self.bits)
        v_NB = scales.split(flat, self.block)
        scale_N, zero_N, finite_N = self._scales(v_NB, flat.dtype)
        if self.symmetric:
            y_NB = v_NB / scale_N[:, None]
        else:
            # Halved, so that the difference of two values near the ends of the range does not overflow.
            y_NB = (v_NB * 0.5 - zero_N[:, None] * 0.5) / (scale_N[:, None] * 0.5)
        q_NB = y_NB.round() if key is None or not self.stochastic else _round_stochastically(y_NB, key)
        if self.symmetric:
            q_NB = q_NB.clamp_(-self.largest_code, self.largest_code)
        else:
            q_NB = q_NB.clamp_(0, self.largest_code)
        offset = 2 ** (self.bits - 1) if self.symmetric else 0
        q_NB = torch.where(finite_N[:, None], q_NB, 0.0) + offset
        scales.write_bf16(body[: 2 * blocks], scale_N)
        if not self.symmetric:
            scales.write_bf16(body[2 * blocks : 4 * blocks], zero_N)
        body[2 * blocks * self.vectors : codes].zero_()
        body[codes:end].copy_(_pack(q_NB.to(torch.uint8), self.bits).view(-1))
        return finite_N.all()

    def _scales(self, v_NB: Tensor, source: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """float32 scales [N] and zero points [N], both NaN where the block is not finite, and bool [N]."""
        if self.symmetric:
            scale_N, finite_N = scales.symmetric_scale(v_NB, self.largest_code, source)
            return scale_N, scale_N, finite_N
        largest = scales.LARGEST[source]
        low_N, high_N = v_NB.amin(dim=1), v_NB.amax(dim=1)
        finite_N = torch.isfinite(low_N) & torch.isfinite(high_N)
        low_N, high_N = torch.where(finite_N, low_N, 0.0), torch.where(finite_N, high_N, 0.0)
        lowest = -scales.largest_scale(1, source)  # the zero point is a bfloat16 too
        zero_N = scales.floor_bf16(low_N.clamp(min=lowest) + 0.0)  # -0.0 becomes 0.0
        # Divided before they are subtracted: the difference may exceed float32.
        foot_N = scales.divide(zero_N, self.largest_code)
        spread_N = (scales.divide(high_N, self.largest_code) - foot_N).clamp(min=0.0)
        head_N = scales.divide(torch.full_like(zero_N, largest), self.largest_code)
        most_N = scales.floor_bf16((head_N - foot_N).clamp(min=0.0))
        scale_N = torch.minimum(scales.ceil_bf16(spread_N), most_N).clamp(min=2 * scales.SMALLEST_SCALE)
        scale_N, zero_N = (torch.where(finite_N, x_N, torch.nan) for x_N in (scale_N, zero_N))
        return scale_N, zero_N, finite_N

    def _decode_reference(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        blocks, codes, end = scales.sections(out.numel(), self.block, self.vectors, self.bits)
        scale_N1 = body[: 2 * blocks].view(torch.bfloat16).to(torch.float32)[:, None]
        q_NB = _unpack(body[codes:end].view(blocks, -1), self.bits).to(torch.float32)
        if self.symmetric:
            value_NB = (q_NB - 2 ** (self.bits - 1)) * scale_N1
        else:
            zero_N1 = body[2 * blocks : 4 * blocks].view(torch.bfloat16).to(torch.float32)[:, None]
            value_NB = (zero_N1 * 0.5 + q_NB * (scale_N1 * 0.5)) * 2.0
        write(value_NB, out, accumulate)


def _round_stochastically(y_NB: Tensor, key: Key) -> Tensor:
    """Up with probability equal to the fractional part, which float32 holds exactly."""
    floor_NB = y_NB.floor()
    u_NB = uniform_blocks(y_NB.shape[0], y_NB.shape[1], key, y_NB.device)
    return floor_NB + (u_NB < y_NB - floor_NB)


def _pack(codes_NB: Tensor, bits: int) -> Tensor:
    """uint8 [N, B * bits / 8] of uint8 codes [N, B]; see Note: [Block codes]."""
    if bits == 8:
        return codes_NB
    parts = codes_NB.view(codes_NB.shape[0], 8 // bits, -1).unbind(1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], start=1):
        packed |= part << (i * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """uint8 codes [N, B] of uint8 [N, B * bits / 8]."""
    if bits == 8:
        return packed
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.cat(parts, dim=1)
