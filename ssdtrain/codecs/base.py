"""The interface of codecs, and the header of payloads.

A payload is one uint8 buffer: a header of 16 bytes, followed by the codec's body (scales first, then data).

    byte 0       format version
    byte 1       0 if every value decodes to a finite number, 1 if the tensor held (or rounded to) Inf or NaN
    byte 2       dtype of the encoded tensor: its index in `PAYLOAD_DTYPES`
    byte 3       1 if the payload does not hold the tensor (see Note: [Overflow]), else 0
    bytes 4-7    CRC-32 of the codec's spec, little endian
    bytes 8-15   number of elements, little endian

Note: [Inf and NaN]
    Training detects an overflow by Inf or NaN in reduced gradients, so a codec must not turn them into finite numbers. Every
    codec sets the flag, and decodes at least the values of the affected block to NaN or Inf. Conversely, finite values
    decode to finite values within the range that each codec documents.

Note: [Overflow]
    A codec that restores every bit at a fixed size cannot do so for every tensor. Where `may_overflow`, the caller asks
    `overflow_flag(payload)` before the payload replaces the tensor, and keeps or sends the tensor itself if it is set. The
    finite flag of such a payload is right, its values are not.

Note: [Host checks]
    Decoding validates a header in host memory (version, spec, number of elements). A header in device memory is not read,
    because the host would have to wait for the device.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

HEADER_BYTES = 16
PAYLOAD_ALIGNMENT = 16
FORMAT_VERSION = 3

_HEADER = struct.Struct("<BBBBIQ")
_NOT_FINITE_BYTE, _OVERFLOW_BYTE = 1, 3
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# The position in this tuple is the header's dtype byte: append only.
PAYLOAD_DTYPES = (
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


HeaderFlag: TypeAlias = Tensor | bool
"""A flag of the header: a bool, or a bool tensor [] on the device, for which nothing waits."""
HeaderFlags: TypeAlias = HeaderFlag | tuple[HeaderFlag, HeaderFlag]
"""The finite flag, with the overflow flag where the codec may overflow."""


class PayloadError(ValueError):
    """The buffer passed to decode is not a payload of this codec for that number of elements."""


class PayloadOverflow(PayloadError):
    """The buffer passed to decode is a payload that could not hold its tensor."""


class Key(NamedTuple):
    """Identifies a stream of random numbers: the same key gives the same payload on any device, in any order, after any restart.

    Encodings with independent errors (different tensors, slices, ranks or steps) need different keys.

    Args:
        seed: 64 bits, the run's.
        step, tensor, rank: 32 bits each: the training step, the number of the tensor or slice, the sender's rank.
    """

    seed: int
    step: int = 0
    tensor: int = 0
    rank: int = 0


class Header(NamedTuple):
    """The header of a payload of finite values, as numbers: for a kernel that writes it."""

    word: int
    """Bytes 0 to 3."""
    fingerprint: int
    """CRC-32 of the spec."""
    numel: int


class Pieces(NamedTuple):
    """Several tensors of one size at equal distances, and their payloads one behind the other.

    Piece i of the payload is that of tensor i, or i + 1 from `skip` on: a rank sends nothing to itself.
    """

    number: int
    stride: int
    """Distance of two tensors, in elements."""
    payload_bytes: int
    """Distance of two payloads."""
    skip: int


@lru_cache(512)
def _header_words(header: Header) -> tuple[int, int]:
    """The 16 bytes as two int64, which kernels are given as numbers: a copy from the host would wait for the device."""
    raw = _HEADER.pack(header.word & 0xFF, 0, header.word >> 16 & 0xFF, 0, header.fingerprint, header.numel)
    first, second = struct.unpack("=qq", raw)
    return first, second


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of payloads and their sections."""
    return -(-nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


def payload_finite(buf: Tensor) -> Tensor:
    """Whether all values of the payload decode to finite numbers: a bool tensor [] on the device of `buf`."""
    return buf[_NOT_FINITE_BYTE] == 0


class Codec(ABC):
    """Encodes a tensor into bytes and decodes it. Immutable and thread-safe.

    Buffers are contiguous, one-dimensional uint8 tensors whose address is a multiple of 16 bytes, and whose offset in their
    storage is one of 8. Payload sizes are multiples of 16, so consecutive payloads in an aligned buffer are aligned.
    """

    inputs: tuple[torch.dtype, ...] = FLOATS

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical specification: `make_codec(codec.spec) == codec`."""

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """E[decode(encode(x))] = x over keys."""

    @property
    @abstractmethod
    def contractive(self) -> bool:
        """E|x - decode(encode(x))|^2 <= (1 - d) |x|^2 for some d > 0 and every finite x above the codec's smallest step, which
        error feedback requires to converge."""

    @property
    @abstractmethod
    def bits_per_value(self) -> float:
        """Payload bits per value of a large tensor: of float32 if it depends on the dtype, and the maximum if it depends on the
        data."""

    @property
    def lossless(self) -> bool:
        """Whether decoding into the encoded dtype restores the same bits."""
        return False

    @property
    def may_overflow(self) -> bool:
        """Whether `ExactCodec.overflow_flag` may be set: the payload of some tensors does not hold them."""
        return False

    @abstractmethod
    def max_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Minimum size in bytes of `out` in encode for `numel` values of `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor, key: Key | None = None) -> int:
        """Write the payload of `x` to the start of `out`, and return its size in bytes.

        Args:
            x: any shape and strides, one of `inputs`; it is not modified.
            out: uint8 [at least max_payload_bytes(x.numel(), x.dtype)] on the device of `x`.
            key: of the random numbers; required by stochastic rounding, ignored by other codecs.

        Raises:
            TypeError: dtype of `x`.
            ValueError: `out` too small, not contiguous, not aligned or on another device; a required key is missing.
        """

    def decode(self, buf: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
        """Decode the payload at the start of `buf` into `out`, or add it to `out`; returns `out`.

        Args:
            buf: uint8, starts with the payload, on the device of `out`.
            out: the number of values that were encoded, any shape and strides.
            accumulate: out += decoded, in float32; `out` must be float32.

        Raises:
            PayloadError: `buf` in host memory is not a payload of this codec for that number of values.
            PayloadOverflow: `buf` in host memory has the overflow flag. On a device nothing is raised and `out` is undefined.
            TypeError: dtype of `out`.
            ValueError: `buf` too short, not contiguous, not aligned or on another device.
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
        if out.is_contiguous() and not (out.is_conj() or out.is_neg()):
            self._decode(body, _flat(out), accumulate)
            return out
        flat = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        self._decode(body, flat, False)
        return out.add_(flat.view(out.shape)) if accumulate else out.copy_(flat.view(out.shape))

    def roundtrip(self, x: Tensor, key: Key | None = None) -> Tensor:
        """decode(encode(x)) with the shape and dtype of `x`. Allocates; for tests and error tables."""
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
        # `reshape` gives columns and repeated values as a strided view. What is to be conjugated or negated when it is read has
        # other bytes in memory.
        return _flat(x.detach().resolve_conj().resolve_neg().contiguous())

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
        if buf.data_ptr() % PAYLOAD_ALIGNMENT:
            raise ValueError(
                f"the payload buffer's address {buf.data_ptr():#x} is not a multiple of {PAYLOAD_ALIGNMENT} bytes"
            )
        if buf.storage_offset() % 8:  # no view of it as numbers
            raise ValueError(
                f"the payload buffer begins {buf.storage_offset()} bytes into its storage, which is not a multiple of 8"
            )

    def _fingerprint(self) -> int:
        return zlib.crc32(self.spec.encode())

    def header(self, dtype: torch.dtype, numel: int) -> Header:
        """The header of a payload of `numel` finite values of `dtype`."""
        return Header(FORMAT_VERSION | PAYLOAD_DTYPES.index(dtype) << 16, self._fingerprint(), numel)

    def _write_header(self, out: Tensor, x: Tensor, finite: HeaderFlag, overflow: HeaderFlag = False) -> None:
        words = _header_words(self.header(x.dtype, x.numel()))
        for place, word in zip(out[:HEADER_BYTES].view(torch.int64), words, strict=True):
            place.fill_(word)
        if isinstance(finite, Tensor):
            torch.logical_not(finite, out=out[_NOT_FINITE_BYTE])
        elif not finite:
            out[_NOT_FINITE_BYTE].fill_(1)
        if isinstance(overflow, Tensor):
            out[_OVERFLOW_BYTE].copy_(overflow)
        elif overflow:
            out[_OVERFLOW_BYTE].fill_(1)

    def _check_header(self, buf: Tensor, out: Tensor) -> None:
        version, _, dtype, overflow, spec, numel = _HEADER.unpack(bytes(buf[:HEADER_BYTES].tolist()))
        if version != FORMAT_VERSION or spec != self._fingerprint():
            raise PayloadError(
                f"not a payload of {self.spec}: format version {version} (this is {FORMAT_VERSION}), "
                f"spec checksum {spec:#010x} (this codec has {self._fingerprint():#010x})"
            )
        if numel != out.numel():
            raise PayloadError(
                f"the payload of {self.spec} holds {numel} values, the output tensor has {out.numel()}"
            )
        if dtype >= len(PAYLOAD_DTYPES):
            raise PayloadError(
                f"the payload of {self.spec} names the dtype {dtype}, of {len(PAYLOAD_DTYPES)}"
            )
        if self.lossless and (encoded := PAYLOAD_DTYPES[dtype]) != out.dtype:
            raise PayloadError(f"{self.spec} decodes to the dtype it encoded, {encoded}, not to {out.dtype}")
        if overflow:
            raise PayloadOverflow(
                f"{self.spec} could not hold this tensor of {numel} values: ask overflow_flag(payload) after encode, and "
                "use the tensor itself where it is set"
            )


class FixedSizeCodec(Codec):
    """A codec whose payload size is a function of the number of values and the dtype, as required by fixed-shape collectives."""

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact size in bytes of the payload of `numel` values of `dtype`, a multiple of 16."""
        return HEADER_BYTES + (align(self._body_bytes(numel, dtype)) if numel else 0)

    def max_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.payload_bytes(numel, dtype)

    def encode(self, x: Tensor, out: Tensor, key: Key | None = None) -> int:
        flat = self._prepare(x, out)
        size = self.payload_bytes(x.numel(), x.dtype)
        if flat.numel() and self._encode_payload(flat, out[:size], self.header(x.dtype, x.numel()), key):
            return size
        flags: HeaderFlags = True
        if flat.numel():
            flags = self._encode(flat, out[HEADER_BYTES:size], key)
            out[HEADER_BYTES + self._body_bytes(x.numel(), x.dtype) : size].zero_()
        finite, overflow = flags if isinstance(flags, tuple) else (flags, False)
        self._write_header(out, flat, finite, overflow)
        return size

    def _min_payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.payload_bytes(numel, dtype)

    def encode_pieces(self, first: Tensor, out: Tensor, pieces: Pieces, key: Key | None = None) -> bool:
        """Encode all `pieces` at once if one kernel can.

        Args:
            first: flat, contiguous: tensor 0, or the memory where it would be if that is the skipped one.
            out: uint8 [pieces.number * pieces.payload_bytes].
            key: of tensor 0. Random numbers of the others differ.

        Returns:
            False if it was not done: encode them one by one.
        """
        return self._encode_payload(first, out, self.header(first.dtype, first.numel()), key, pieces)

    def _encode_payload(
        self, flat: Tensor, payload: Tensor, header: Header, key: Key | None, pieces: Pieces | None = None
    ) -> bool:
        """Encode `flat`, header included, by one kernel. False: there is none for this codec and device."""
        return False

    @abstractmethod
    def _body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes after the header for `numel` > 0 values."""

    @abstractmethod
    def _encode(self, flat: Tensor, body: Tensor, key: Key | None) -> HeaderFlags:
        """Encode the contiguous, non-empty `flat` [numel] into `body`; returns flags of the header."""


class VariableSizeCodec(Codec):
    """A codec whose payload size depends on the data: for drives and for messages that carry their size, not for fixed-shape
    collectives."""

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


class ExactCodec(Codec):
    """A codec that restores every bit."""

    unbiased = True
    contractive = True
    lossless = True
    may_overflow = False

    def overflow_flag(self, buf: Tensor) -> Tensor:
        """uint8 [1], not zero if the payload at the start of `buf` does not hold its tensor.

        A view of the header on the device of `buf`: nothing waits, and it can be copied with the rest. See Note: [Overflow].
        """
        return buf[_OVERFLOW_BYTE : _OVERFLOW_BYTE + 1]


def write(values: Tensor, out: Tensor, accumulate: bool) -> None:
    """Copy the first values of contiguous `values` to `out` [numel], or add them to it."""
    flat = values.reshape(-1)[: out.numel()]
    if accumulate:
        out.add_(flat)
    else:
        out.copy_(flat)


def _flat(contiguous: Tensor) -> Tensor:
    """The values as a vector of stride 1: one value counts as contiguous whatever its stride, and is not viewed as bytes then."""
    return contiguous.as_strided((1,), (1,)) if contiguous.numel() == 1 else contiguous.view(-1)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
