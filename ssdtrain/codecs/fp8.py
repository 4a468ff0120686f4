"""float8 with one bfloat16 scale per block."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssdtrain.codecs import scales
from ssdtrain.codecs.base import Key, write
from ssdtrain.codecs.block import BlockCodec

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Float8Block(BlockCodec):
    """Blocks of float8 e4m3 (largest 448) or e5m2 (largest 57344), scaled so that the block's largest
    magnitude fits, rounded to nearest even.

    Body: bfloat16 scales [blocks], padded to 16 bytes, then one byte per value. Values above LARGEST of the
    dtype (scales.py) are clipped to it, less than 0.8%.
    """

    unbiased = False
    contractive = True

    format: str = "e4m3"
    block: int = 128
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        scales.check_block(self.block)
        if self.format not in _FORMATS:
            raise ValueError(f"format={self.format}: float8 has {' and '.join(_FORMATS)}")

    @property
    def spec(self) -> str:
        return f"fp8:format={self.format},block={self.block}"

    @property
    def dtype(self) -> torch.dtype:
        return _FORMATS[self.format]

    @property
    def block_format(self) -> scales.BlockFormat:
        kind = scales.E4M3 if self.format == "e4m3" else scales.E5M2
        return scales.BlockFormat(self.block, 8, kind, torch.finfo(self.dtype).max)

    def _encode_reference(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor:
        blocks, codes, end = scales.sections(flat.numel(), self.block, 1, 8)
        largest = torch.finfo(self.dtype).max
        v_NB = scales.split(flat, self.block)
        scale_N, finite_N = scales.symmetric_scale(v_NB, largest, flat.dtype)
        y_NB = torch.where(finite_N[:, None], v_NB / scale_N[:, None], 0.0).clamp_(-largest, largest)
        scales.write_bf16(body[: 2 * blocks], scale_N)
        body[2 * blocks : codes].zero_()
        body[codes:end].view(self.dtype).copy_(y_NB.view(-1))
        return finite_N.all()

    def _decode_reference(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        blocks, codes, end = scales.sections(out.numel(), self.block, 1, 8)
        scale_N = body[: 2 * blocks].view(torch.bfloat16).to(torch.float32)
        y_NB = body[codes:end].view(self.dtype).to(torch.float32).view(blocks, self.block)
        write(y_NB * scale_N[:, None], out, accumulate)
