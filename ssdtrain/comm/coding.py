"""Pieces of tensors to payloads and back, some of their elements exactly.

Note: [Exact elements]
    Gradients of norms, biases and embeddings lie in the same buckets as all others. Within a piece they are ranges, known to all
    ranks: what is between goes through the codec as one tensor, they follow as they are, in one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssdtrain.codecs import ALIGNMENT, FixedSizeCodec, Key

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
    """A codec for pieces. Without a codec all elements are exact."""

    codec: FixedSizeCodec | None

    def nbytes(self, numel: int, exact: Ranges, dtype: torch.dtype) -> int:
        """Size of a piece's payload, a multiple of 16.

        Args:
            dtype: of the tensor that the piece is of; exact elements travel in it.
        """
        if self.codec is None:
            return _padded(numel * dtype.itemsize)
        kept = _count(exact)
        return self.codec.payload_bytes(numel - kept, torch.float32) + _padded(kept * dtype.itemsize)

    def encode(self, x: Tensor, exact: Ranges, dtype: torch.dtype, out: Tensor, key: Key) -> None:
        """Write the payload of the flat piece `x` [numel] to `out`, uint8 [nbytes]."""
        if self.codec is None:
            _write(out, [x], dtype)
            return
        if not exact:
            self.codec.encode(self._input(x), out, key)
            return
        lossy = [x[a:b] for a, b in _others(exact, x.numel())]
        size = self.codec.payload_bytes(x.numel() - _count(exact), torch.float32)
        self.codec.encode(self._input(torch.cat(lossy) if lossy else x[:0]), out[:size], key)
        _write(out[size:], [x[a:b] for a, b in exact], dtype)

    def decode(
        self, payload: Tensor, out: Tensor, exact: Ranges, dtype: torch.dtype, accumulate: bool = False
    ) -> None:
        """Decode into the flat piece `out` [numel], or add to it; `out` is float32 then."""
        if self.codec is None:
            values = _read(payload, out.numel(), dtype)
            if accumulate:
                out.add_(values)
            else:
                out.copy_(values)
            return
        if not exact:
            self.codec.decode(payload, out, accumulate)
            return
        others = _others(exact, out.numel())
        count = _count(others)
        lossy = torch.empty(count, dtype=out.dtype, device=out.device)
        self.codec.decode(payload, lossy)
        kept = _read(payload[self.codec.payload_bytes(count, torch.float32) :], _count(exact), dtype)
        for ranges, values in ((others, lossy), (exact, kept)):
            for (a, b), part in zip(ranges, values.split([b - a for a, b in ranges]), strict=True):
                if accumulate:
                    out[a:b].add_(part)
                else:
                    out[a:b].copy_(part)

    def _input(self, x: Tensor) -> Tensor:
        assert self.codec is not None
        return x if x.dtype in self.codec.inputs else x.float()


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
