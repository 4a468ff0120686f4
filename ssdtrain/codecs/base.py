"""The contract that every codec keeps, and the header that every payload starts with.

A payload is one uint8 buffer: a header of 16 bytes, then the codec's own body (scales first, data after
them).

    byte 0      version of the format byte 1      finite flag: 1 if every value decodes to a finite number, 0
    if the tensor held (or rounded to) Inf or NaN byte 2      dtype of the encoded tensor byte 3      0 bytes
    4-7   CRC-32 of the codec's spec, little endian bytes 8-15  number of elements, little endian

Note: [Inf and NaN]
    Training finds an overflow by looking for Inf or NaN in what was reduced. A codec must not turn them into
    plausible numbers, so every codec does both: the flag is cleared, and at least the values of the block
    that held the Inf or NaN decode to NaN or Inf. The converse holds within the range each codec states:
    finite values decode to finite values.

Note: [Host checks]
    A header in host memory is checked at decode (version, spec, number of elements). One in device memory is
    not, because reading it would make the host wait for the device.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 16
ALIGNMENT = 16
FORMAT_VERSION = 1

_HEADER = struct.Struct("<BBBBIQ")
_FINITE_BYTE = 1
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# The position in this tuple is the header's dtype byte: append only.
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
)


class PayloadError(ValueError):
    """The buffer given to decode does not hold a payload of this codec for that many elements."""


class Key(NamedTuple):
    """Names one stream of random numbers: the same key gives the same payload on any device, in any order,
    after any restart.

    Two encodes whose errors have to be independent (two tensors, two slices of one, two ranks, two steps)
    need two keys.

    Args:
        seed: of the run, 64 bits.
        step: of training, 32 bits.
        tensor: number of the tensor or slice, 32 bits.
        rank: of the sender, 32 bits.
    """

    seed: int
    step: int = 0
    tensor: int = 0
    rank: int = 0


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of payloads and of the sections in them."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def payload_finite(buf: Tensor) -> Tensor:
    """Whether everything in the payload decodes to finite numbers: a bool tensor of shape [] on the device of
    `buf`."""
    return buf[_FINITE_BYTE] == 1


class Codec(ABC):
    """Encodes a tensor into bytes and back. Objects are immutable and may be used from several threads at
    once.

    Buffers are contiguous, one-dimensional uint8 tensors whose address is a multiple of 16 bytes. Every
    payload's size is a multiple of 16 too, so payloads placed one after the other in an aligned buffer stay
    aligned.
    """

    inputs: tuple[torch.dtype, ...] = FLOATS

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical string that makes this codec: `make_codec(codec.spec) == codec`."""

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """E[decode(encode(x))] = x over keys."""

    @property
    @abstractmethod
    def contractive(self) -> bool:
        """E|x - decode(encode(x))|^2 <= (1 - d) |x|^2 for some d > 0 and every finite x above the codec's
        smallest step: what error feedback needs to converge."""

    @property
    @abstractmethod
    def bits_per_value(self) -> float:
        """Payload bits per value of a large tensor; of a float32 tensor, where it depends on the dtype, and
        at most."""

    @property
    def lossless(self) -> bool:
        """Decoding into the dtype that was encoded gives the same bits."""
        return False

    @abstractmethod
    def max_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes that `out` of encode must have for `numel` values of `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor, key: Key | None = None) -> int:
        """Write the payload of `x` to the start of `out` and return its size in bytes.

        Args:
            x: any shape and strides, one of `inputs`; it is not modified.
            out: uint8 [at least max_payload_bytes(x.numel(), x.dtype)] on the device of `x`.
            key: of the randomness; codecs that round stochastically need one, the others ignore it.

        Raises:
            TypeError: dtype of `x`.
            ValueError: `out` too small, not contiguous, not aligned, on another device; no key where one is
                needed.
        """

    def decode(self, buf: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
        """Decode the payload at the start of `buf` into `out`, or add it to `out`; returns `out`.

        Args:
            buf: uint8, the payload and anything behind it, on the device of `out`.
            out: as many values as were encoded, any shape and strides.
            accumulate: out += decoded, in float32; `out` must be float32.

        Raises:
            PayloadError: `buf` in host memory is not a payload of this codec for that many values.
            TypeError: dtype of `out`.
            ValueError: `buf` too short, not contiguous, not aligned, on another device.
        """
        if out.dtype not in self.inputs:
            raise TypeError(f"{self.spec} decodes to {_names(self.inputs)}, not to {out.dtype}")
        if accumulate and out.dtype != torch.float32:
            raise TypeError(f"accumulate adds in float32 and needs a float32 tensor, not {out.dtype}")
        self._check_buffer(buf, out, self._min_payload_bytes(out.numel(), out.dtype))
        if buf.device.type == "cpu":
            self._check_header(buf, out)
        out = out.detach()
        if out.numel() == 0:
            return out
        body = buf[HEADER_BYTES:]
        if out.is_contiguous():
            self._decode(body, out.view(-1), accumulate)
            return out
        flat = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        self._decode(body, flat, False)
        return out.add_(flat.view(out.shape)) if accumulate else out.copy_(flat.view(out.shape))

    def roundtrip(self, x: Tensor, key: Key | None = None) -> Tensor:
        """decode(encode(x)), shape and dtype of `x`. For tests and error tables: it allocates."""
        buf = torch.empty(self.max_payload_bytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
        self.encode(x, buf, key)
        return self.decode(buf, torch.empty(x.shape, dtype=x.dtype, device=x.device))

    @abstractmethod
    def _decode(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        """Decode into the contiguous, non-empty `out` [numel]."""

    @abstractmethod
    def _min_payload_bytes(self, numel: int, dtype: torch.dtype) -> int: ...

    def _prepare(self, x: Tensor, out: Tensor) -> Tensor:
        if x.dtype not in self.inputs:
            raise TypeError(f"{self.spec} encodes {_names(self.inputs)}, not {x.dtype}")
        self._check_buffer(out, x, self.max_payload_bytes(x.numel(), x.dtype))
        return x.detach().reshape(-1)

    def _check_buffer(self, buf: Tensor, other: Tensor, need: int) -> None:
        if buf.dtype != torch.uint8 or buf.dim() != 1 or not buf.is_contiguous():
            raise ValueError(
                f"a payload buffer is a contiguous uint8 vector, not {buf.dtype} {list(buf.shape)}"
            )
        if buf.device != other.device:
            raise ValueError(f"the payload buffer is on {buf.device}, the tensor on {other.device}")
        if buf.numel() < need:
            raise ValueError(
                f"{self.spec} needs {need} bytes for {other.numel()} values of {other.dtype}, "
                f"the payload buffer has {buf.numel()}"
            )
        if buf.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"the payload buffer's address {buf.data_ptr():#x} is not a multiple of {ALIGNMENT} bytes"
            )

    def _fingerprint(self) -> int:
        return zlib.crc32(self.spec.encode())

    def _write_header(self, out: Tensor, x: Tensor, finite: Tensor | bool) -> None:
        plain = bool(finite) if isinstance(finite, bool) else True
        raw = _HEADER.pack(
            FORMAT_VERSION, int(plain), DTYPES.index(x.dtype), 0, self._fingerprint(), x.numel()
        )
        out[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8), non_blocking=True)
        if isinstance(finite, Tensor):
            out[_FINITE_BYTE].copy_(finite)

    def _check_header(self, buf: Tensor, out: Tensor) -> None:
        version, _, dtype, _, spec, numel = _HEADER.unpack(bytes(buf[:HEADER_BYTES].tolist()))
        if version != FORMAT_VERSION or spec != self._fingerprint():
            raise PayloadError(
                f"not a payload of {self.spec}: format version {version} (this is {FORMAT_VERSION}), "
                f"spec checksum {spec:#010x} (this codec has {self._fingerprint():#010x})"
            )
        if numel != out.numel():
            raise PayloadError(
                f"the payload of {self.spec} holds {numel} values, the output tensor has {out.numel()}"
            )
        if self.lossless and DTYPES[dtype] != out.dtype:
            raise PayloadError(
                f"{self.spec} decodes to the dtype it encoded, {DTYPES[dtype]}, not to {out.dtype}"
            )


class FixedSizeCodec(Codec):
    """A codec whose payload size follows from the number of values and the dtype: what a fixed-shape
    collective needs."""

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact size in bytes of the payload of `numel` values of `dtype`, a multiple of 16."""
        return HEADER_BYTES + (align(self._body_bytes(numel, dtype)) if numel else 0)

    def max_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.payload_bytes(numel, dtype)

    def encode(self, x: Tensor, out: Tensor, key: Key | None = None) -> int:
        flat = self._prepare(x, out)
        size = self.payload_bytes(x.numel(), x.dtype)
        finite = self._encode(flat, out[HEADER_BYTES:size], key) if flat.numel() else True
        self._write_header(out, flat, finite)
        return size

    def _min_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.payload_bytes(numel, dtype)

    @abstractmethod
    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes behind the header for `numel` > 0 values."""

    @abstractmethod
    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> Tensor | bool:
        """Encode the contiguous, non-empty `flat` [numel] into `body`; returns the finite flag."""


class VariableSizeCodec(Codec):
    """A codec whose payload size depends on the data: for drives, and for messages sent with their size.
    Never for a fixed-shape collective."""

    def encode(self, x: Tensor, out: Tensor, key: Key | None = None) -> int:
        flat = self._prepare(x, out)
        finite, body_bytes = self._encode(flat, out[HEADER_BYTES:]) if flat.numel() else (True, 0)
        self._write_header(out, flat, finite)
        return HEADER_BYTES + align(body_bytes)

    def _min_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return HEADER_BYTES

    @abstractmethod
    def _encode(self, flat: Tensor, body: Tensor) -> tuple[Tensor | bool, int]:
        """Encode the contiguous, non-empty `flat` [numel] into `body`; returns the finite flag and the bytes
        written."""


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
