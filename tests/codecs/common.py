"""What the codec tests share."""

import torch
from torch import Tensor

from ssdtrain.codecs import Codec, Key

KEY = Key(seed=0x1234_5678_9ABC, step=7, tensor=3, rank=2)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


DIRTY = 0xA5
"""Value of the bytes of a buffer before anything is encoded into it."""


def payload(codec: Codec, x: Tensor, key: Key | None = KEY, dirty: int = DIRTY) -> Tensor:
    """The payload of `x` alone, encoded into a dirty buffer so that every byte has to be written."""
    buf = torch.full((codec.max_payload_bytes(x.numel(), x.dtype),), dirty, dtype=torch.uint8)
    return buf[: codec.encode(x, buf, key)]


def decoded(codec: Codec, buf: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full(like.shape, 1.5, dtype=dtype or like.dtype)
    return codec.decode(buf, out)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(codec: Codec, x: Tensor, key: Key | None = KEY) -> float:
    """L2 norm of the error over the L2 norm of `x`."""
    return float((codec.roundtrip(x, key) - x).norm() / x.norm())
