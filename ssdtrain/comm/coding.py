"""Encodes pieces of tensors into payloads and decodes them; excluded elements stay uncompressed.

Note: [Uncompressed elements]
    Gradients of norms, biases and embeddings lie in the same buckets as all others. Within a piece they are ranges, known to all
    ranks: what is between goes through the codec as one tensor, they follow uncompressed, in one message.

Note: [No payload larger than its piece]
    A codec's header and scales may outweigh what it saves on a few elements. Such a piece is sent uncompressed. Sender and
    receiver know its size, its excluded ranges and its dtype, so both make the same choice before anything is sent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.codecs import PAYLOAD_ALIGNMENT, FixedSizeCodec, Key
from ssdtrain.codecs.base import Pieces, align

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

    Args:
        dtype: of the framework's tensor: pieces that no codec is applied to are sent in it.
        excluded_dtype: in which excluded elements are sent beside encoded ones; None: `dtype`.
    """

    codec: FixedSizeCodec | None
    dtype: torch.dtype
    excluded_dtype: torch.dtype | None = None

    @property
    def _excluded_dtype(self) -> torch.dtype:
        return self.excluded_dtype or self.dtype

    def encodes(self, piece: TensorPiece) -> bool:
        """Return whether the codec is applied to a piece of this size. See Note: [No payload larger than its piece]."""
        return self.nbytes(piece) < piece.values.numel() * self.dtype.itemsize

    def nbytes(self, piece: TensorPiece) -> int:
        """Return the size of a piece's payload, at most that of the piece; a multiple of 16 where the codec is applied."""
        numel, kept = piece.values.numel(), _count(piece.uncompressed_ranges)
        raw = numel * self.dtype.itemsize
        if self.codec is None:
            return raw
        uncompressed = align(kept * self._excluded_dtype.itemsize)
        return min(raw, self.codec.payload_bytes(numel - kept, torch.float32) + uncompressed)

    def encode(self, piece: TensorPiece, out: Tensor, key: Key) -> None:
        """Write the payload of `piece` to `out`, uint8 [nbytes]."""
        x, ranges, reference = piece
        if self.codec is None or not self.encodes(piece):
            _write(out, [x], self.dtype)
            return
        lossy, size = _select(x, ranges), out.numel()
        if reference is not None:
            lossy = lossy.float() - _select(reference, ranges).float()
        elif lossy.dtype not in self.codec.inputs:
            lossy = lossy.float()
        if ranges:
            size = self.codec.payload_bytes(lossy.numel(), torch.float32)
            _write(out[size:], [x[a:b] for a, b in ranges], self._excluded_dtype)
        payload = out[:size]
        # Behind an uncompressed message of any length.
        aligned = payload if payload.data_ptr() % PAYLOAD_ALIGNMENT == 0 else torch.empty_like(payload)
        self.codec.encode(lossy, aligned, key)
        if aligned is not payload:
            payload.copy_(aligned)

    def encode_pieces(self, first: Tensor, out: Tensor, pieces: Pieces, key: Key) -> bool:
        """Encode several pieces without uncompressed ranges; see `FixedSizeCodec.encode_pieces`."""
        codec = self.codec
        if codec is None or first.dtype not in codec.inputs or out.data_ptr() % PAYLOAD_ALIGNMENT:
            return False
        return codec.encode_pieces(first, out, pieces, key)

    def decode(self, payload: Tensor, out: TensorPiece, accumulate: bool = False) -> None:
        """Decode into `out.values`, or add to them. With a reference they are the sum of it and the decoded difference, rounded
        once."""
        values, ranges, reference = out
        write: Callable[[Tensor, Tensor], Any] = Tensor.add_ if accumulate else Tensor.copy_
        if self.codec is None or not self.encodes(out):
            write(values, _read(payload, values.numel(), self.dtype))
            return
        aligned = payload if payload.data_ptr() % PAYLOAD_ALIGNMENT == 0 else payload.clone()
        if not ranges and reference is None:
            self.codec.decode(aligned, values, accumulate)
            return
        kept = _count(ranges)
        dtype = values.dtype if reference is None else torch.float32
        lossy = torch.empty(values.numel() - kept, dtype=dtype, device=values.device)
        self.codec.decode(aligned, lossy)
        uncompressed = _read(
            payload[self.codec.payload_bytes(lossy.numel(), torch.float32) :], kept, self._excluded_dtype
        )
        if reference is not None:
            lossy += _select(reference, ranges).float()
        for places, decoded in ((_others(ranges, values.numel()), lossy), (ranges, uncompressed)):
            for (a, b), part in zip(places, decoded.split([b - a for a, b in places]), strict=True):
                write(values[a:b], part)


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
