"""Lossless: byte planes, each compressed with zstandard or stored unchanged.

Exponents of trained tensors carry about 3 bits of information, while signs and mantissas are nearly incompressible. Therefore the
bytes are separated by their position in the value, and only compressible planes are compressed: about 1.5x for bfloat16, at most
1.2x for float32.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from ssdtrain.codecs import native
from ssdtrain.codecs.base import (
    FLOATS,
    HEADER_BYTES,
    PAYLOAD_DTYPES,
    ExactCodec,
    PayloadError,
    VariableSizeCodec,
    align,
)

_SAMPLE = 1 << 16
_WORTHWHILE = 0.97  # of the raw bytes; above that a plane is stored uncompressed
# Floats are rotated left by one bit, so that the exponent of float32 and bfloat16 is one byte and not part of two.
_ROTATED = {
    torch.float32: (torch.int32, 31),
    torch.bfloat16: (torch.int16, 15),
    torch.float16: (torch.int16, 15),
}


def _zstandard() -> ModuleType:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise RuntimeError("the lossless codec needs zstandard: pip install ssdtrain[lossless]") from error


@dataclass(frozen=True)
class Lossless(ExactCodec, VariableSizeCodec):
    """Restores every bit, including NaN payloads and the sign of zero. Any dtype, host memory only.

    Body: one int64 per byte plane, its bytes in the payload (as many as values: not compressed), padded to 16 bytes; the planes.

    Args:
        level: of zstandard. Higher ones cost much time for little.
    """

    level: int = 1
    backend: str = field(default="auto", compare=False)

    inputs = PAYLOAD_DTYPES
    bits_per_value = 32.0

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 22:
            raise ValueError(f"level={self.level}: zstandard has levels 1 to 22")
        _zstandard()

    @property
    def spec(self) -> str:
        return f"lossless:level={self.level}"

    def max_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        planes = align(8 * dtype.itemsize) + numel * dtype.itemsize if numel else 0
        return align(HEADER_BYTES + planes)

    def _encode(self, flat: Tensor, body: Tensor) -> tuple[Tensor | bool, int]:
        self._check_host(flat)
        compressor = self._compressor(flat.dtype)
        numel, planes = flat.numel(), _planes(flat, self.backend)
        at = align(8 * len(planes))
        sizes = []
        for plane in planes:
            packed = self._compress(compressor, plane)
            if packed is None:
                body[at : at + numel].copy_(plane)
                sizes.append(numel)
            else:
                ctypes.memmove(body.data_ptr() + at, packed, len(packed))
                sizes.append(len(packed))
            at += sizes[-1]
        table = struct.pack(f"<{len(sizes)}q", *sizes).ljust(align(8 * len(planes)), b"\0")
        ctypes.memmove(body.data_ptr(), table, len(table))
        body[at : align(at)].zero_()
        return finite_flag(flat, self.backend), at

    def _compressor(self, dtype: torch.dtype) -> object:
        """Exponents get the smallest match table at level 1: they do not repeat in strings, and what a search finds
        by chance costs time (a factor of 3) and space (a tenth) against entropy coding alone."""
        zstandard = _zstandard()
        if self.level > 1 or dtype not in _ROTATED:
            return zstandard.ZstdCompressor(level=self.level, write_content_size=False)
        return zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(
                1,
                hash_log=6,
                min_match=7,
                target_length=0,
                strategy=zstandard.STRATEGY_FAST,
                write_content_size=False,
            )
        )

    def _compress(self, compressor: object, plane: Tensor) -> bytes | None:
        """The compressed plane, or None if it is not compressible; a sample from its middle is tested first."""
        numel = plane.numel()
        if numel > 4 * _SAMPLE:
            sample = plane[numel // 2 : numel // 2 + _SAMPLE]
            if len(compressor.compress(_view(sample))) > _WORTHWHILE * _SAMPLE:  # type: ignore[attr-defined]
                return None
        packed: bytes = compressor.compress(_view(plane))  # type: ignore[attr-defined]
        return packed if len(packed) < _WORTHWHILE * numel else None

    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        self._check_host(out)
        numel, count = out.numel(), out.dtype.itemsize
        at = align(8 * count)
        if body.numel() < at:
            raise PayloadError(f"{self.spec}: the payload ends within its table of planes")
        sizes = struct.unpack(f"<{count}q", ctypes.string_at(body.data_ptr(), 8 * count))
        if min(sizes) < 0 or max(sizes) > numel or at + sum(sizes) > body.numel():
            raise PayloadError(
                f"{self.spec}: planes of {sizes} bytes do not fit {numel} values in {body.numel()} bytes"
            )
        planes = torch.empty(count, numel, dtype=torch.uint8, device="cpu")
        for plane, size in zip(planes, sizes, strict=True):
            packed = body[at : at + size]
            at += size
            if size == numel:
                plane.copy_(packed)
            else:
                self._decompress(packed, plane)
        if accumulate:
            values = torch.empty_like(out)
            _merge(planes, values, self.backend)
            out.add_(values)
        else:
            _merge(planes, out, self.backend)

    def _decompress(self, packed: Tensor, plane: Tensor) -> None:
        zstandard = _zstandard()
        try:
            with zstandard.ZstdDecompressor().stream_reader(_view(packed)) as reader:
                got = reader.readinto(_view(plane))
        except zstandard.ZstdError as error:
            raise PayloadError(f"{self.spec}: damaged plane of {packed.numel()} bytes: {error}") from error
        if got != plane.numel():
            raise PayloadError(f"{self.spec}: a plane of {plane.numel()} bytes decompresses to {got}")

    def _check_host(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise ValueError(f"{self.spec} works in host memory, the tensor is on {tensor.device}")


def finite_flag(flat: Tensor, backend: str) -> Tensor | bool:
    """Whether `flat` [numel] of any dtype holds neither Inf nor NaN."""
    if flat.dtype in FLOATS and native.usable(backend, flat):
        return native.all_finite(flat)
    if flat.is_floating_point() and flat.dtype.itemsize == 1:
        flat = flat.to(torch.float32)  # isfinite does not support float8
    return torch.isfinite(flat).all() if flat.is_floating_point() or flat.is_complex() else True


def _view(tensor: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """The bytes of a contiguous host tensor under the buffer protocol; the caller keeps the tensor alive."""
    return (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())


def _planes(flat: Tensor, backend: str) -> Tensor:
    """uint8 [itemsize, numel]: every byte of the dtype, lowest first."""
    planes = torch.empty(flat.dtype.itemsize, flat.numel(), dtype=torch.uint8, device="cpu")
    if flat.dtype.itemsize in (2, 4) and native.usable(backend, flat):
        native.split_planes(flat, planes, flat.dtype in _ROTATED)
        return planes
    if flat.dtype in _ROTATED:
        integer, top = _ROTATED[flat.dtype]
        bits = flat.view(integer)
        flat = (bits << 1) | (bits >> top & 1)
    return planes.copy_(flat.view(torch.uint8).view(flat.numel(), -1).t())


def _merge(planes: Tensor, out: Tensor, backend: str) -> None:
    """The inverse of `_planes`, into contiguous `out` [numel]."""
    if out.dtype.itemsize in (2, 4) and native.usable(backend, out):
        native.merge_planes(planes, out, out.dtype in _ROTATED)
        return
    integer, top = _ROTATED.get(out.dtype, (out.dtype, 0))
    values = planes.t().contiguous().view(-1).view(integer)
    if out.dtype in _ROTATED:
        values = (values >> 1 & (1 << top) - 1) | (values << top)
    out.copy_(values.view(out.dtype))
