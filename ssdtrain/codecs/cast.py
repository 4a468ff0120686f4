"""Casts: the value in another floating-point format, or unchanged."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssdtrain.codecs import native
from ssdtrain.codecs.base import ExactCodec, FixedSizeCodec, Key, write

_TARGETS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(FixedSizeCodec):
    """Round to nearest even in bfloat16 ("bf16") or float16 ("fp16").

    Values beyond the target's range become Inf, as the cast does, and clear the finite flag. float16 flushes
    values below 2^-25 to zero, so it does not contract; bfloat16 has the range of float32.
    """

    unbiased = False
    bits_per_value = 16.0

    target: str
    backend: str = field(default="auto", compare=False)

    @property
    def spec(self) -> str:
        return self.target

    @property
    def dtype(self) -> torch.dtype:
        return _TARGETS[self.target]

    @property
    def contractive(self) -> bool:
        return self.target == "bf16"

    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor | bool:
        data = body[: 2 * flat.numel()].view(self.dtype)
        if self.target == "bf16" and native.usable(self.backend, flat, body):
            return native.bf16_encode(flat, data)
        data.copy_(flat)
        return torch.isfinite(data).all()

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        data = body[: 2 * out.numel()].view(self.dtype)
        if self.target == "bf16" and native.usable(self.backend, body, out):
            native.bf16_decode(data, out, accumulate)
        else:
            write(data, out, accumulate)


@dataclass(frozen=True)
class Raw(ExactCodec, FixedSizeCodec):
    """The unchanged bits of the tensor, behind the header: the codec to compare the others with."""

    spec = "raw"
    bits_per_value = 32.0

    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor | bool:
        nbytes = flat.numel() * flat.dtype.itemsize
        body[:nbytes].view(flat.dtype).copy_(flat)
        return native.all_finite(flat) if native.usable("auto", flat) else torch.isfinite(flat).all()

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        write(body[: out.numel() * out.dtype.itemsize].view(out.dtype), out, accumulate)
