"""A checksum of the bytes of a storage, on its device: tells whether they were changed past torch's version counters."""

from __future__ import annotations

import torch

__all__ = ["checksum"]

_BLOCK = 1 << 17  # words at a time: on a CPU what is computed of them stays in the cache
_PLACE, _MIX, _CARRY = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def checksum(storage: torch.UntypedStorage) -> torch.Tensor:
    """An int64 of all bytes and their places; equal bytes give an equal one. Needs memory for some MiB at most.

    A sum alone would not see that all signs are changed, or that rows are exchanged: each word is mixed with its place first.
    """
    found = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    whole = found.numel() // 8 * 8
    words, rest = found[:whole].view(torch.int64), found[whole:].to(torch.int64)
    places = torch.arange(1, min(words.numel(), _BLOCK) + 8, device=storage.device) * _PLACE
    total = torch.zeros((), dtype=torch.int64, device=storage.device)
    for block in (*words.split(_BLOCK), rest):
        mixed = block + places[: block.numel()]
        mixed ^= mixed >> 29
        mixed *= _MIX
        mixed ^= mixed >> 32
        total = total * _CARRY + mixed.sum()
    return total
