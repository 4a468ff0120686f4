"""Encodes pieces of tensors into payloads and decodes them; excluded elements lose nothing.

Note: [Uncompressed elements]
    Gradients of norms, biases and embeddings lie in the same buckets as all others. Within a piece they are ranges, known to all
    ranks: what is between goes through the codec as one tensor, they follow in one message, uncompressed or through an exact
    codec. An exact codec of the whole piece needs no ranges.

Note: [No payload larger than its piece]
    A codec's header and scales may outweigh what it saves on a few elements. Such a piece is sent uncompressed. Sender and
    receiver know its size, its excluded ranges and its dtype, so both make the same choice before anything is sent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.codecs import PAYLOAD_ALIGNMENT, ExactCodec, FixedSizeCodec, Key
from ssdtrain.codecs.base import Pieces, align

WORTHWHILE = 0.02
"""Share of a payload that exact coding of its excluded elements has to save: below it, reading a flag costs more."""

Ranges = tuple[tuple[int, int], ...]
"""Ascending, disjoint (start, stop) of elements."""


class TensorPiece(NamedTuple):
    """Part of a flat tensor: what is encoded, or the place that a payload is decoded into."""

    values: Tensor
    """Flat [numel], a view."""
    uncompressed_ranges: Ranges = ()
    """Elements that are excluded from compression, counted from the piece's start."""
    reference: Tensor | None = None
    """Flat [numel]: the codec is applied to the difference from it, in float32. Excluded elements are those of `values`."""


def clip(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the part of `ranges` in [start, stop), counted from `start`. A tensor laid out by rank has ranges for each, and is
    clipped for each: so they are bisected."""
    first = bisect_right(ranges, start, key=itemgetter(1))
    last = bisect_left(ranges, stop, lo=first, key=itemgetter(0))
    return tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges[first:last])


def _others(ranges: Ranges, numel: int) -> Ranges:
    edges = [0, *(edge for pair in ranges for edge in pair), numel]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def _count(ranges: Ranges) -> int:
    return sum(b - a for a, b in ranges)


@dataclass(frozen=True)
class Coder:
    """A codec for the pieces of a tensor. Without a codec no element is compressed.

    A payload has at most one exact section, which may overflow (see `overflow`): all of it, or its excluded elements.

    Args:
        dtype: of the framework's tensor: pieces that no codec is applied to are sent in it.
        excluded_dtype: in which excluded elements are sent beside encoded ones; None: `dtype`.
        excluded_codec: exact; of excluded elements beside encoded ones, where it saves enough; None: they are uncompressed.
    """

    codec: FixedSizeCodec | None
    dtype: torch.dtype
    excluded_dtype: torch.dtype | None = None
    excluded_codec: FixedSizeCodec | None = None

    @property
    def _excluded_dtype(self) -> torch.dtype:
        return self.excluded_dtype or self.dtype

    @property
    def is_exact(self) -> bool:
        """Whether the codec restores every bit: then no element is excluded from it."""
        return self.codec is not None and self.codec.lossless

    @property
    def may_overflow(self) -> bool:
        """Whether payloads of some pieces may overflow."""
        codec = self.codec if self.is_exact else self.excluded_codec
        return codec is not None and codec.may_overflow

    @property
    def without_exact(self) -> Coder:
        """This coder with uncompressed elements in place of exact sections."""
        return replace(self, codec=None if self.is_exact else self.codec, excluded_codec=None)

    def encodes(self, piece: TensorPiece) -> bool:
        """Return whether a codec is applied to a piece of this size. See Note: [No payload larger than its piece]."""
        return self.nbytes(piece) < piece.values.numel() * self.dtype.itemsize

    def loses(self, piece: TensorPiece) -> bool:
        """Return whether decoded elements may differ from those of `piece`, rounding to `excluded_dtype` apart."""
        lossy = self.codec is not None and not self.is_exact
        return lossy and _count(piece.uncompressed_ranges) < piece.values.numel() and self.encodes(piece)

    def nbytes(self, piece: TensorPiece) -> int:
        """Return the size of a piece's payload, at most that of the piece; a multiple of 16 where a codec is applied."""
        raw = piece.values.numel() * self.dtype.itemsize
        return raw if self.codec is None else min(raw, sum(self._sections(piece)))

    def _sections(self, piece: TensorPiece) -> tuple[int, int]:
        """Return the bytes of encoded elements and of excluded ones behind them."""
        assert self.codec is not None
        numel = piece.values.numel()
        if self.is_exact:
            return self.codec.payload_bytes(numel, self.dtype), 0
        kept = _count(piece.uncompressed_ranges)
        coded = self.codec.payload_bytes(numel - kept, torch.float32)
        uncompressed = align(kept * self._excluded_dtype.itemsize)
        if self.excluded_codec is not None and kept:
            exact = self.excluded_codec.payload_bytes(kept, self._excluded_dtype)
            if uncompressed - exact >= WORTHWHILE * (coded + uncompressed):
                return coded, exact
        return coded, uncompressed

    def _exact_section(self, piece: TensorPiece) -> slice | None:
        """Return the bytes of the exact section in a payload of `piece`; None: it has none."""
        if self.codec is None or not self.encodes(piece):
            return None
        coded, excluded = self._sections(piece)
        if self.is_exact:
            return slice(0, coded)
        kept = _count(piece.uncompressed_ranges)
        is_coded = excluded < align(kept * self._excluded_dtype.itemsize)
        return slice(coded, coded + excluded) if is_coded else None

    def exact_elements(self, piece: TensorPiece) -> Tensor | None:
        """Return what the exact section of a payload of `piece` holds, flat; None: it has none."""
        if self._exact_section(piece) is None:
            return None
        if self.is_exact:
            return piece.values.to(self.dtype)
        parts = [piece.values[a:b] for a, b in piece.uncompressed_ranges]
        return torch.cat(parts).to(self._excluded_dtype)

    def overflow_flag(self, payload: Tensor, piece: TensorPiece) -> Tensor | None:
        """Return a view of the byte that says whether the exact section overflowed; None: it has none, or none that may.

        Args:
            piece: of the shape of the one that was encoded.
        """
        section = self._exact_section(piece) if self.may_overflow else None
        codec = self.codec if self.is_exact else self.excluded_codec
        if section is None or not isinstance(codec, ExactCodec):
            return None
        return codec.overflow_flag(payload[section])

    def exact_shape(self, piece: TensorPiece) -> tuple[int, torch.dtype]:
        """Return the number of elements of the exact section, and their dtype."""
        if self.is_exact:
            return piece.values.numel(), self.dtype
        return _count(piece.uncompressed_ranges), self._excluded_dtype

    def encode(self, piece: TensorPiece, out: Tensor, key: Key) -> None:
        """Write the payload of `piece` to `out`, uint8 [nbytes]."""
        x, ranges, reference = piece
        if self.codec is None or not self.encodes(piece):
            _write(out, [x], self.dtype)
            return
        coded, _ = self._sections(piece)
        if self.is_exact:
            _encode(self.codec, x.to(self.dtype), out, key)
            return
        lossy = _select(x, ranges)
        if reference is not None:
            lossy = lossy.float() - _select(reference, ranges).float()
        elif lossy.dtype not in self.codec.inputs:
            lossy = lossy.float()
        if ranges and self._exact_section(piece) is not None:
            assert self.excluded_codec is not None
            excluded = self.exact_elements(piece)
            assert excluded is not None
            _encode(self.excluded_codec, excluded, out[coded:], key)
        elif ranges:
            _write(out[coded:], [x[a:b] for a, b in ranges], self._excluded_dtype)
        _encode(self.codec, lossy, out[:coded], key)

    def encode_pieces(self, first: Tensor, out: Tensor, pieces: Pieces, key: Key) -> bool:
        """Encode several pieces without uncompressed ranges; see `FixedSizeCodec.encode_pieces`."""
        codec = self.codec
        if codec is None or first.dtype not in codec.inputs or out.data_ptr() % PAYLOAD_ALIGNMENT:
            return False
        return codec.encode_pieces(first, out, pieces, key)

    def decode(
        self, payload: Tensor, out: TensorPiece, accumulate: bool = False, exact: Tensor | None = None
    ) -> None:
        """Decode into `out.values`, or add to them. With a reference they are the sum of it and the decoded difference, rounded
        once.

        Args:
            exact: the elements of the exact section, which is then not decoded.
        """
        values, ranges, reference = out
        write: Callable[[Tensor, Tensor], Any] = Tensor.add_ if accumulate else Tensor.copy_
        if self.codec is None or not self.encodes(out):
            write(values, _read(payload, values.numel(), self.dtype))
            return
        if self.is_exact:
            if exact is None and not accumulate and values.dtype == self.dtype:
                self.codec.decode(_aligned(payload), values)
            elif exact is None:
                write(values, _decoded(self.codec, payload, values.numel(), self.dtype))
            elif accumulate or exact.data_ptr() != values.data_ptr():
                write(values, exact)
            return
        coded, _ = self._sections(out)
        if not ranges and reference is None:
            self.codec.decode(_aligned(payload), values, accumulate)
            return
        kept = _count(ranges)
        dtype = values.dtype if reference is None else torch.float32
        lossy = _decoded(self.codec, payload[:coded], values.numel() - kept, dtype)
        if exact is None and self._exact_section(out) is not None:
            assert self.excluded_codec is not None
            exact = _decoded(self.excluded_codec, payload[coded:], kept, self._excluded_dtype)
        uncompressed = exact if exact is not None else _read(payload[coded:], kept, self._excluded_dtype)
        if reference is not None:
            lossy += _select(reference, ranges).float()
        for places, decoded in ((_others(ranges, values.numel()), lossy), (ranges, uncompressed)):
            for (a, b), part in zip(places, decoded.split([b - a for a, b in places]), strict=True):
                write(values[a:b], part)


def _encode(codec: FixedSizeCodec, values: Tensor, out: Tensor, key: Key) -> None:
    """Encode into `out`, which may lie behind an uncompressed message of any length."""
    aligned = out if out.data_ptr() % PAYLOAD_ALIGNMENT == 0 else torch.empty_like(out)
    codec.encode(values, aligned, key)
    if aligned is not out:
        out.copy_(aligned)


def _aligned(payload: Tensor) -> Tensor:
    return payload if payload.data_ptr() % PAYLOAD_ALIGNMENT == 0 else payload.clone()


def _decoded(codec: FixedSizeCodec, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return codec.decode(_aligned(payload), torch.empty(numel, dtype=dtype, device=payload.device))


def _select(x: Tensor, uncompressed_ranges: Ranges) -> Tensor:
    """Return the elements of flat `x` that the codec is applied to, in order."""
    if not uncompressed_ranges:
        return x
    parts = [x[a:b] for a, b in _others(uncompressed_ranges, x.numel())]
    return torch.cat(parts) if parts else x[:0]


def _write(out: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
    values, at = out.view(dtype), 0
    for part in parts:
        values[at : at + part.numel()].copy_(part)
        at += part.numel()


def _read(payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return payload[: numel * dtype.itemsize].view(dtype)
