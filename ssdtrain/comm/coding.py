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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.codecs import PAYLOAD_ALIGNMENT, FixedSizeCodec, Key
from ssdtrain.codecs.base import HEADER_BYTES, Pieces, align
from ssdtrain.codecs.exact import Exact
from ssdtrain.codecs.overflow import keep_values, kept_values

WORTHWHILE = 0.02
"""Share of a payload that exact coding of its excluded elements has to save: below it, reading a flag costs more."""
SECTION = {"cpu": 1 << 16, "cuda": 1 << 20}
"""Elements of an exact section, by device: a GPU takes as long for a short section as for a long one."""

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
class ExactSections:
    """A flat tensor in exact payloads, one behind the other: each has a flag of its own, and what does not fit concerns few
    elements.

    Args:
        size: elements of a section, but for the last.
    """

    codec: Exact
    numel: int
    dtype: torch.dtype
    size: int

    @property
    def elements(self) -> list[slice]:
        """The elements of each section."""
        return [slice(a, min(a + self.size, self.numel)) for a in range(0, self.numel, self.size)]

    @property
    def behind(self) -> list[slice]:
        """The elements of each section that its payload has no place for where it overflows."""
        return [
            slice(a + kept_values(self.codec, b - a, self.dtype), b)
            for a, b in ((section.start, section.stop) for section in self.elements)
        ]

    @property
    def nbytes(self) -> int:
        whole, rest = divmod(self.numel, self.size)
        nbytes = whole * self.codec.payload_bytes(self.size, self.dtype)
        return nbytes + (self.codec.payload_bytes(rest, self.dtype) if rest else 0)

    def _payloads(self, buf: Tensor) -> list[tuple[slice, Tensor]]:
        """Return the elements and the payload of each section."""
        step = self.codec.payload_bytes(self.size, self.dtype)
        return list(zip(self.elements, buf[: self.nbytes].split(step), strict=True))

    def encode(self, values: Tensor, out: Tensor, key: Key) -> None:
        """Write flat `values` to the start of `out`, uint8."""
        for section, payload in self._payloads(out):
            _encode(self.codec, values[section], payload, key)
            if payload.is_cuda or self.codec.overflow_flag(payload):
                kept = values[section][: kept_values(self.codec, section.stop - section.start, self.dtype)]
                keep_values(self.codec, kept.contiguous(), payload, payload.numel())

    def flags(self, buf: Tensor) -> list[Tensor]:
        """Return views of the bytes, uint8 [1], that say which sections did not fit."""
        return [self.codec.overflow_flag(payload) for _, payload in self._payloads(buf)]

    def decode(self, buf: Tensor, out: Tensor, known: Mapping[int, Tensor]) -> None:
        """Decode into flat `out` of the dtype that was encoded.

        Args:
            known: sections that are not decoded, by number, with their elements, which may lie in `out`, or with those that are
                not in their payload.
        """
        for number, (section, payload) in enumerate(self._payloads(buf)):
            elements, place = known.get(number), out[section]
            if elements is None:
                self.codec.decode(_aligned(payload), place)
                continue
            kept, behind = place.tensor_split([place.numel() - elements.numel()])
            kept.copy_(_read(payload[HEADER_BYTES:], kept.numel(), self.dtype))
            if elements.data_ptr() != behind.data_ptr():
                behind.copy_(elements)

    def split(self, values: Tensor) -> dict[int, Tensor]:
        """Return flat `values` by section."""
        return {number: values[section] for number, section in enumerate(self.elements)}


@dataclass(frozen=True)
class Coder:
    """A codec for the pieces of a tensor. Without a codec no element is compressed.

    Exact are, in sections that may overflow (see `overflow`), all elements of a payload, or the excluded ones, or none.

    Args:
        dtype: of the framework's tensor: pieces that no codec is applied to are sent in it.
        excluded_dtype: in which excluded elements are sent beside encoded ones; None: `dtype`.
        excluded_codec: exact; of excluded elements beside encoded ones, where it saves enough; None: they are uncompressed.
        section: elements of an exact section.
    """

    codec: FixedSizeCodec | None
    dtype: torch.dtype
    excluded_dtype: torch.dtype | None = None
    excluded_codec: Exact | None = None
    section: int = 1 << 16

    @property
    def _excluded_dtype(self) -> torch.dtype:
        return self.excluded_dtype or self.dtype

    @property
    def is_exact(self) -> bool:
        """Whether the codec restores every bit: then no element is excluded from it."""
        return isinstance(self.codec, Exact)

    @property
    def may_overflow(self) -> bool:
        """Whether payloads of some pieces may overflow."""
        return self.is_exact or self.excluded_codec is not None

    @property
    def without_exact(self) -> Coder:
        """This coder with uncompressed elements in place of exact ones."""
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
        return min(raw, sum(self._layout(piece)[:2]))

    def _layout(self, piece: TensorPiece) -> tuple[int, int, ExactSections | None]:
        """Return the bytes of elements that a lossy codec encodes, and of the others behind them, and their exact sections."""
        numel = piece.values.numel()
        if self.codec is None:
            return 0, numel * self.dtype.itemsize, None
        if isinstance(self.codec, Exact):
            exact = ExactSections(self.codec, numel, self.dtype, self.section)
            return 0, exact.nbytes, exact
        kept = _count(piece.uncompressed_ranges)
        coded = self.codec.payload_bytes(numel - kept, torch.float32)
        uncompressed = align(kept * self._excluded_dtype.itemsize)
        if self.excluded_codec is not None and kept:
            exact = ExactSections(self.excluded_codec, kept, self._excluded_dtype, self.section)
            if uncompressed - exact.nbytes >= WORTHWHILE * (coded + uncompressed):
                return coded, exact.nbytes, exact
        return coded, uncompressed, None

    def exact(self, piece: TensorPiece) -> ExactSections | None:
        """Return the exact sections of a payload of `piece`; None: it has none."""
        return self._layout(piece)[2] if self.encodes(piece) else None

    def exact_elements(self, piece: TensorPiece) -> Tensor:
        """Return what exact sections hold, flat."""
        if self.is_exact:
            return piece.values.to(self.dtype)
        parts = [piece.values[a:b] for a, b in piece.uncompressed_ranges]
        return torch.cat(parts).to(self._excluded_dtype)

    def known_sections(self, piece: TensorPiece) -> dict[int, Tensor]:
        """Return the elements of the exact sections of `piece`, which then need not be decoded."""
        exact = self.exact(piece)
        return {} if exact is None else exact.split(self.exact_elements(piece))

    def overflow_flags(self, payload: Tensor, piece: TensorPiece) -> list[Tensor]:
        """Return views of the bytes, uint8 [1], that say which exact sections did not fit.

        Args:
            piece: of the shape of the one that was encoded.
        """
        exact = self.exact(piece)
        return [] if exact is None else exact.flags(payload[self._layout(piece)[0] :])

    def encode(self, piece: TensorPiece, out: Tensor, key: Key) -> None:
        """Write the payload of `piece` to `out`, uint8 [nbytes]."""
        x, ranges, reference = piece
        if self.codec is None or not self.encodes(piece):
            _write(out, [x], self.dtype)
            return
        coded, _, exact = self._layout(piece)
        if exact is not None:
            exact.encode(self.exact_elements(piece), out[coded:], key)
        elif ranges:
            _write(out[coded:], [x[a:b] for a, b in ranges], self._excluded_dtype)
        if self.is_exact:
            return
        lossy = _select(x, ranges)
        if reference is not None:
            lossy = lossy.float() - _select(reference, ranges).float()
        elif lossy.dtype not in self.codec.inputs:
            lossy = lossy.float()
        _encode(self.codec, lossy, out[:coded], key)

    def encode_pieces(self, first: Tensor, out: Tensor, pieces: Pieces, key: Key) -> bool:
        """Encode several pieces without uncompressed ranges; see `FixedSizeCodec.encode_pieces`."""
        codec = self.codec
        if codec is None or self.is_exact or first.dtype not in codec.inputs:
            return False
        return out.data_ptr() % PAYLOAD_ALIGNMENT == 0 and codec.encode_pieces(first, out, pieces, key)

    def decode(
        self,
        payload: Tensor,
        out: TensorPiece,
        accumulate: bool = False,
        known: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Decode into `out.values`, or add to them. With a reference they are the sum of it and the decoded difference, rounded
        once.

        Args:
            known: elements of exact sections, by number, which are then not decoded.
        """
        values, ranges, reference = out
        write: Callable[[Tensor, Tensor], Any] = Tensor.add_ if accumulate else Tensor.copy_
        if self.codec is None or not self.encodes(out):
            write(values, _read(payload, values.numel(), self.dtype))
            return
        coded, _, exact = self._layout(out)
        if exact is not None and self.is_exact and not accumulate and values.dtype == self.dtype:
            exact.decode(payload, values, known or {})
            return
        uncompressed = payload[:0]
        if exact is not None:
            uncompressed = torch.empty(exact.numel, dtype=exact.dtype, device=payload.device)
            exact.decode(payload[coded:], uncompressed, known or {})
        elif ranges:
            uncompressed = _read(payload[coded:], _count(ranges), self._excluded_dtype)
        if self.is_exact:
            write(values, uncompressed)
            return
        if not ranges and reference is None:
            self.codec.decode(_aligned(payload), values, accumulate)
            return
        dtype = values.dtype if reference is None else torch.float32
        lossy = torch.empty(values.numel() - _count(ranges), dtype=dtype, device=values.device)
        self.codec.decode(_aligned(payload[:coded]), lossy)
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
