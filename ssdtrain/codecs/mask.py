"""Boolean masks: one bit per value, or the positions of the true ones where those are fewer bytes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssdtrain.codecs import kernels, native
from ssdtrain.codecs.base import ExactCodec, FixedSizeCodec, Key, PayloadError, VariableSizeCodec, align

_DENSE = -1


def _packed_bytes(numel: int) -> int:
    return -(-numel // 8)


def _pack(flat: Tensor, packed: Tensor, backend: str) -> None:
    """bool `flat` [numel] to the bits of `packed` [numel / 8, rounded up], the first value in the lowest bit."""
    if native.usable(backend, flat, packed):
        native.mask_pack(flat, packed)
        return
    if flat.numel() and kernels.usable(backend, flat, packed):
        kernels.mask_pack(flat, packed)
        return
    bits = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
    place = torch.arange(8, dtype=torch.uint8, device=flat.device)
    torch.sum(bits << place, dim=1, dtype=torch.uint8, out=packed)


def _unpack(packed: Tensor, out: Tensor, backend: str) -> None:
    if native.usable(backend, packed, out):
        native.mask_unpack(packed, out)
        return
    if out.numel() and kernels.usable(backend, packed, out):
        kernels.mask_unpack(packed, out)
        return
    place = torch.arange(8, dtype=torch.uint8, device=out.device)
    out.copy_((packed[:, None] >> place & 1).view(-1)[: out.numel()])


class _MaskCodec(ExactCodec):
    inputs = (torch.bool,)
    bits_per_value = 1.0


@dataclass(frozen=True)
class Mask(_MaskCodec, FixedSizeCodec):
    """One bit per value of a bool tensor (dropout and attention masks): an eighth of its bytes."""

    spec = "mask"

    backend: str = field(default="auto", compare=False)

    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return _packed_bytes(numel)

    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor | bool:
        used = _packed_bytes(flat.numel())
        _pack(flat, body[:used], self.backend)
        if used < body.numel():
            body[used:].zero_()
        return True

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        _unpack(body[: _packed_bytes(out.numel())], out, self.backend)


@dataclass(frozen=True)
class SparseMask(_MaskCodec, VariableSizeCodec):
    """The positions of the true values, four bytes each, where fewer than one value in 32 is true (expert routing maps); else one
    bit per value. Finding the positions makes the host wait for the device.

    Body: int64 number of positions (-1: packed bits follow), padded to 16 bytes; int32 positions.
    """

    spec = "mask:sparse"

    backend: str = field(default="auto", compare=False)

    def max_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return align(32 + _packed_bytes(numel)) if numel else 16

    def _encode(self, flat: Tensor, body: Tensor) -> tuple[Tensor | bool, int]:
        count = int(torch.count_nonzero(flat))
        sparse = 4 * count < _packed_bytes(flat.numel()) and flat.numel() <= 1 << 31
        used = 4 * count if sparse else _packed_bytes(flat.numel())
        body[:16].zero_()
        body[:8].view(torch.int64).fill_(count if sparse else _DENSE)
        data = body[16 : 16 + used]
        if sparse:
            data.view(torch.int32).copy_(flat.nonzero().view(-1))
        else:
            _pack(flat, data, self.backend)
        body[16 + used : align(16 + used)].zero_()
        return True, 16 + used

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        count = int(body[:8].view(torch.int64)) if body.numel() >= 16 else None
        used = _packed_bytes(out.numel()) if count == _DENSE else 4 * (count or 0)
        if count is None or count < _DENSE or body.numel() < 16 + used:
            raise PayloadError(f"{self.spec}: {body.numel()} bytes do not hold {count} positions")
        data = body[16 : 16 + used]
        if count == _DENSE:
            _unpack(data, out, self.backend)
        else:
            positions = data.view(torch.int32).to(torch.int64)
            if count and not bool(((positions >= 0) & (positions < out.numel())).all()):
                raise PayloadError(f"{self.spec}: a position lies outside of {out.numel()} values")
            out.zero_()
            out[positions] = True
