"""A Hadamard rotation before another codec: spreads outliers over their block, so that block scales fit better.

It helps heavy-tailed tensors (gradients, SwiGLU hidden states), not Gaussian ones. The rotation is orthonormal: it preserves the
L2 norm of the inner codec's error, and whether the codec is unbiased or contractive.
"""

import math
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from ssdtrain.codecs import kernels, native
from ssdtrain.codecs.base import FixedSizeCodec, Header, HeaderFlags, Key, Pieces, write
from ssdtrain.codecs.block import BlockCodec
from ssdtrain.codecs.philox import philox
from ssdtrain.codecs.scales import Rotation

SIZES = (16, 32, 64, 128, 256)
_SIGN_SEED = 0x5353_4454  # any constant: the signs are part of the format


@dataclass(frozen=True)
class Hadamard(FixedSizeCodec):
    """Rotates blocks of `size` values by H D / sqrt(size), and encodes the result as float32 with `inner`.

    D holds fixed random signs; without them a block of equal values would become a single large value. The tensor is padded with
    zeros to a multiple of `size`. A finite value above 2^127 / sqrt(size) may overflow and is then reported as not finite; values
    near the limit of the output dtype may decode to Inf. Inf and NaN spread over their block of `size` values.
    """

    inner: FixedSizeCodec
    size: int = 128
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"hadamard={self.size}: allowed sizes are {', '.join(map(str, SIZES))}")

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

    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> HeaderFlags:
        block = self._fused_block(flat, body)
        if block is not None:
            block.check_key(key, flat.numel())
            return native.block_encode(block.block_format, flat, body, key, self._rotation())
        return self.inner._encode(self._rotated(flat), body, key)

    def _encode_payload(
        self, flat: Tensor, payload: Tensor, header: Header, key: Key | None, pieces: Pieces | None = None
    ) -> bool:
        if pieces is not None or native.usable(self.backend, flat, payload):
            return False
        if not kernels.usable(self.backend, flat, payload):
            return False
        # A rotation leaves the range of its input. The inner codec writes the header of this one.
        return self.inner._encode_payload(self._rotated(flat), payload, header, key)

    def _rotated(self, flat: Tensor) -> Tensor:
        """float32, padded with zeros to whole blocks."""
        rotated = torch.empty(self._padded(flat.numel()), dtype=torch.float32, device=flat.device)
        if native.usable(self.backend, flat):
            native.rotate(flat, rotated, self._rotation())
        elif kernels.usable(self.backend, flat):
            kernels.rotate(flat, rotated, signs(self.size, flat.device), _unit(self.size))
        else:
            rotated[flat.numel() :].zero_()
            rotated[: flat.numel()].copy_(flat)
            rotated = rotate(rotated.view(-1, self.size) * signs(self.size, flat.device)).view(-1)
        return rotated

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
        if kernels.usable(self.backend, out):
            kernels.unrotate(rotated, out, signs(self.size, out.device), _unit(self.size), accumulate)
            return
        write(rotate(rotated.view(-1, self.size)) * signs(self.size, out.device), out, accumulate)

    def _fused_block(self, *tensors: Tensor) -> BlockCodec | None:
        """The inner codec if the C implementation can rotate its blocks on the fly, without a copy of the tensor."""
        inner = self.inner
        if not isinstance(inner, BlockCodec) or inner.block != self.size:
            return None
        return inner if native.usable(self.backend, *tensors) else None

    def _rotation(self) -> Rotation:
        return Rotation(_signs(self.size), _unit(self.size))


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


@cache
def signs(size: int, device: torch.device) -> Tensor:
    """float32 [size] of 1 and -1, copied to a device once."""
    return _signs(size).to(device)


@cache
def _signs(size: int) -> Tensor:
    word = philox(torch.arange(size, dtype=torch.int64, device="cpu"), Key(_SIGN_SEED))[0]
    return 1.0 - 2.0 * (word & 1).to(torch.float32)
