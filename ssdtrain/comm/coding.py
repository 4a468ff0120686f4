"""Encodes pieces of tensors into payloads and decodes them; excluded elements stay uncompressed.

Note: [Uncompressed elements]
    Gradients of norms, biases and embeddings lie in the same buckets as all others. Within a piece they are ranges, known to all
    ranks: what is between goes through the codec as one tensor, they follow as they are, in one message.

Note: [No payload larger than its piece]
    A codec's header and scales may outweigh what it saves on a few elements. Such a piece is sent uncompressed. Sender and
    receiver know its size, its excluded ranges and its dtype, so both make the same choice before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssdtrain.codecs import ALIGNMENT, FixedSizeCodec, Key
from ssdtrain.codecs.base import Pieces

Ranges = tuple[tuple[int, int], ...]
"""Ascending, disjoint (start, stop) of elements."""


def clip(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The part of `ranges` in [start, stop), counted from `start`."""
    return tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and b > start)


def _others(ranges: Ranges, numel: int) -> Ranges:
    edges = [0, *(edge for pair in ranges for edge in pair), numel]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def _count(ranges: Ranges) -> int:
    return sum(b - a for a, b in ranges)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Coder:
    """A codec for pieces. Without a codec no element is compressed.

    Arguments of all methods: `uncompressed_ranges`, the excluded elements of the piece; `dtype`, that of the whole tensor, in
    which uncompressed elements are sent.
    """

    codec: FixedSizeCodec | None

    def encodes(self, numel: int, uncompressed_ranges: Ranges, dtype: torch.dtype) -> bool:
        """Whether the codec is applied to a piece of this size. See Note: [No payload larger than its piece]."""
        return (
            self.codec is not None
            and self._coded_bytes(numel, _count(uncompressed_ranges), dtype) < numel * dtype.itemsize
        )

    def nbytes(self, numel: int, uncompressed_ranges: Ranges, dtype: torch.dtype) -> int:
        """Size of a piece's payload, at most that of the piece; a multiple of 16 where the codec is applied."""
        raw = numel * dtype.itemsize
        return (
            raw
            if self.codec is None
            else min(raw, self._coded_bytes(numel, _count(uncompressed_ranges), dtype))
        )

    def _coded_bytes(self, numel: int, kept: int, dtype: torch.dtype) -> int:
        assert self.codec is not None
        return self.codec.payload_bytes(numel - kept, torch.float32) + _padded(kept * dtype.itemsize)

    def encode(
        self,
        x: Tensor,
        uncompressed_ranges: Ranges,
        dtype: torch.dtype,
        out: Tensor,
        key: Key,
        reference: Tensor | None = None,
    ) -> None:
        """Write the payload of the flat piece `x` [numel] to `out`, uint8 [nbytes].

        Args:
            reference: [numel]; the codec is applied to the difference `x - reference`, in float32. Uncompressed elements are
                those of `x`, whatever the reference is.
        """
        if self.codec is None or not self.encodes(x.numel(), uncompressed_ranges, dtype):
            _write(out, [x], dtype)
            return
        lossy, size = self._input(_select(x, uncompressed_ranges)), out.numel()
        if reference is not None:
            lossy = lossy.float() - _select(reference, uncompressed_ranges).float()
        if uncompressed_ranges:
            size = self.codec.payload_bytes(lossy.numel(), torch.float32)
            _write(out[size:], [x[a:b] for a, b in uncompressed_ranges], dtype)
        payload = out[:size]
        # Behind a message that is sent as it is, of any length.
        aligned = payload if payload.data_ptr() % ALIGNMENT == 0 else torch.empty_like(payload)
        self.codec.encode(lossy, aligned, key)
        if aligned is not payload:
            payload.copy_(aligned)

    def encode_pieces(self, first: Tensor, out: Tensor, pieces: Pieces, key: Key) -> bool:
        """The payloads of several pieces without uncompressed ranges; see `FixedSizeCodec.encode_pieces`."""
        codec = self.codec
        if codec is None or first.dtype not in codec.inputs or out.data_ptr() % ALIGNMENT:
            return False
        return codec.encode_pieces(first, out, pieces, key)

    def decode(self, payload: Tensor, out: Tensor, uncompressed_ranges: Ranges, dtype: torch.dtype) -> None:
        """Decode into the flat piece `out` [numel]."""
        if not self.encodes(out.numel(), uncompressed_ranges, dtype):
            out.copy_(_read(payload, out.numel(), dtype))
        elif not uncompressed_ranges:
            self._decode(payload, out)
        else:
            lossy = torch.empty(out.numel() - _count(uncompressed_ranges), dtype=out.dtype, device=out.device)
            kept = self._decode_both(payload, lossy, uncompressed_ranges, dtype)
            for place, values in _places(out, _others(uncompressed_ranges, out.numel()), lossy):
                place.copy_(values)
            for place, values in _places(out, uncompressed_ranges, kept):
                place.copy_(values)

    def accumulate(
        self, payload: Tensor, out: Tensor, uncompressed_ranges: Ranges, dtype: torch.dtype
    ) -> None:
        """Add the decoded piece to the flat float32 `out` [numel]."""
        if not self.encodes(out.numel(), uncompressed_ranges, dtype):
            out.add_(_read(payload, out.numel(), dtype))
        elif not uncompressed_ranges:
            self._decode(payload, out, accumulate=True)
        else:
            lossy = torch.empty(out.numel() - _count(uncompressed_ranges), dtype=out.dtype, device=out.device)
            kept = self._decode_both(payload, lossy, uncompressed_ranges, dtype)
            for place, values in _places(out, _others(uncompressed_ranges, out.numel()), lossy):
                place.add_(values)
            for place, values in _places(out, uncompressed_ranges, kept):
                place.add_(values)

    def apply_difference(
        self, payload: Tensor, out: Tensor, uncompressed_ranges: Ranges, dtype: torch.dtype
    ) -> None:
        """Turn the reference in `out` [numel], of any dtype, into what was encoded with that reference: differences are added
        in float32 and the sum is rounded once, uncompressed elements replace what is there."""
        if not self.encodes(out.numel(), uncompressed_ranges, dtype):
            out.copy_(_read(payload, out.numel(), dtype))
            return
        change = torch.empty(
            out.numel() - _count(uncompressed_ranges), dtype=torch.float32, device=out.device
        )
        kept = self._decode_both(payload, change, uncompressed_ranges, dtype)
        for place, values in _places(out, _others(uncompressed_ranges, out.numel()), change):
            place.copy_(place.float() + values)
        for place, values in _places(out, uncompressed_ranges, kept):
            place.copy_(values)

    def _decode_both(
        self, payload: Tensor, lossy: Tensor, uncompressed_ranges: Ranges, dtype: torch.dtype
    ) -> Tensor:
        """Decode what the codec was applied to into `lossy`; returns the uncompressed elements."""
        assert self.codec is not None
        self._decode(payload, lossy)
        size = self.codec.payload_bytes(lossy.numel(), torch.float32)
        return _read(payload[size:], _count(uncompressed_ranges), dtype)

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool = False) -> None:
        assert self.codec is not None
        aligned = payload if payload.data_ptr() % ALIGNMENT == 0 else payload.clone()
        self.codec.decode(aligned, out, accumulate)

    def _input(self, x: Tensor) -> Tensor:
        assert self.codec is not None
        return x if x.dtype in self.codec.inputs else x.float()


def _select(x: Tensor, uncompressed_ranges: Ranges) -> Tensor:
    """The elements of flat `x` that the codec is applied to, in order."""
    if not uncompressed_ranges:
        return x
    parts = [x[a:b] for a, b in _others(uncompressed_ranges, x.numel())]
    return torch.cat(parts) if parts else x[:0]


def _places(out: Tensor, ranges: Ranges, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of `ranges` of `out`, with its part of `values`, which lie one behind the other."""
    for (a, b), part in zip(ranges, values.split([b - a for a, b in ranges]), strict=True):
        yield out[a:b], part


def _write(out: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
    at = 0
    for part in parts:
        raw = part.to(dtype).contiguous().view(torch.uint8)
        out[at : at + raw.numel()].copy_(raw)
        at += raw.numel()


def _read(payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return payload[: numel * dtype.itemsize].view(dtype)


def spans(total: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, total) in spans of at most `step`."""
    for start in range(0, total, step):
        yield start, min(start + step, total)
