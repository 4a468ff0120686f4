"""A Hadamard rotation in front of another codec: it spreads a few large values over their block, so that
block scales fit better.

It helps heavy-tailed tensors (gradients, SwiGLU hidden states) and does nothing for Gaussian ones. The
rotation is orthonormal: the error of the inner codec comes back with the same L2 norm, and what is unbiased
or contractive stays so.
"""

import math
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from ssdtrain.codecs import native
from ssdtrain.codecs.base import FixedSizeCodec, Key
from ssdtrain.codecs.block import IntBlock
from ssdtrain.codecs.fp8 import Float8Block
from ssdtrain.codecs.philox import philox

SIZES = (16, 32, 64, 128, 256)
_SIGN_SEED = 0x5353_4454  # any constant: the signs are part of the format


@dataclass(frozen=True)
class Hadamard(FixedSizeCodec):
    """Rotate blocks of `size` values by H D / sqrt(size), encode the result as float32 with `inner`.

    D holds fixed random signs; without them a block of equal values, the commonest structure there is, would
    become one large one. The tensor is filled up with zeros to a multiple of `size`. A finite value above
    2^127 / sqrt(size) may overflow and is then reported as not finite, and values next to the end of the output
    dtype's range may decode to Inf; Inf and NaN spread over their block of `size` values.
    """

    inner: FixedSizeCodec
    size: int = 128
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"hadamard={self.size}: the rotation has {', '.join(map(str, SIZES))} values")

    @property
    def spec(self) -> str:
        return f"{self.inner.spec}{',' if ':' in self.inner.spec else ':'}hadamard={self.size}"

    @property
    def unbiased(self) -> bool:
        return self.inner.unbiased

    @property
    def contractive(self) -> bool:
        return self.inner.contractive

    @property
    def bits_per_value(self) -> float:
        return self.inner.bits_per_value

    def _padded(self, numel: int) -> int:
        return -(-numel // self.size) * self.size

    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner._body_bytes(self._padded(numel), torch.float32)

    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor | bool:
        block = self._fused_block(flat, body)
        if block is not None:
            if isinstance(block, IntBlock):
                block.check_key(key, flat.numel())
            return native.block_encode(block.block_format, flat, body, key, self._rotation())
        padded = self._padded(flat.numel())
        if native.usable(self.backend, flat):
            rotated = torch.empty(padded, dtype=torch.float32, device=flat.device)
            native.rotate(flat, rotated, self._rotation())
        else:
            x = torch.zeros(padded, dtype=torch.float32, device=flat.device)
            x[: flat.numel()].copy_(flat)
            rotated = rotate(x.view(-1, self.size) * signs(self.size, x.device)).view(-1)
        return self.inner._encode(rotated, body, key)

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        block = self._fused_block(body, out)
        if block is not None:
            native.block_decode(block.block_format, body, out, accumulate, self._rotation())
            return
        rotated = torch.empty(self._padded(out.numel()), dtype=torch.float32, device=out.device)
        self.inner._decode(body, rotated, False)
        if native.usable(self.backend, out):
            native.unrotate(rotated, out, self._rotation(), accumulate)
            return
        values = (rotate(rotated.view(-1, self.size)) * signs(self.size, out.device)).view(-1)[: out.numel()]
        if accumulate:
            out.add_(values)
        else:
            out.copy_(values)

    def _fused_block(self, *tensors: Tensor) -> IntBlock | Float8Block | None:
        """The inner codec where the C implementation rotates its blocks as it reads them, without a copy of the tensor."""
        inner = self.inner
        if not isinstance(inner, (IntBlock, Float8Block)) or inner.block != self.size:
            return None
        return inner if native.usable(self.backend, *tensors) else None

    def _rotation(self) -> native.Rotation:
        return native.Rotation(_signs(self.size), _unit(self.size))


def rotate(x_NB: Tensor) -> Tensor:
    """x H / sqrt(B) for float32 [N, B], B a power of two, by log2(B) butterflies in a fixed order (pairs 1,
    2, 4, ... apart), which every implementation repeats addition by addition."""
    N, B = x_NB.shape
    x = x_NB * _unit(B)  # first, so that the sums do not overflow
    half = 1
    while half < B:
        a, b = x.view(N, B // (2 * half), 2, half).unbind(2)
        x = torch.stack((a + b, a - b), dim=2).view(N, B)
        half *= 2
    return x


@cache
def _unit(size: int) -> float:
    return float(torch.tensor(1 / math.sqrt(size), dtype=torch.float32, device="cpu"))


def signs(size: int, device: torch.device) -> Tensor:
    """float32 [size] of 1 and -1."""
    return _signs(size).to(device)


@cache
def _signs(size: int) -> Tensor:
    word = philox(torch.arange(size, dtype=torch.int64, device="cpu"), Key(_SIGN_SEED))[0]
    return 1.0 - 2.0 * (word & 1).to(torch.float32)
