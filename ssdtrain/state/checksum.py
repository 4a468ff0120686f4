"""A checksum of a tensor's bytes, which tells whether they were changed past torch's version counters."""

from __future__ import annotations

import torch

from ssdtrain.codecs import kernels
from ssdtrain.storage.memory import digest

_WORDS_AT_A_TIME = 1 << 17  # which bounds the memory that plain torch needs to some MiB
_PLACE, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


def checksum(storage: torch.UntypedStorage) -> torch.Tensor:
    """Compute an int64 of all bytes and their places on their device.

    A sum alone would not see that all signs are changed, or that rows are exchanged: each word is mixed with its place first. In
    host memory it is the digest of drives, which the processor has an instruction for.
    """
    if storage.device.type == "cpu":
        return torch.tensor(digest(storage.data_ptr(), storage.nbytes(), 1) >> 1, device="cpu")
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    whole = raw.numel() // 8 * 8
    words, rest = raw[:whole].view(torch.int64), raw[whole:].to(torch.int64)
    use_kernel = words.numel() > 0 and kernels.usable("auto", words)
    total = kernels.checksum(words, _PLACE, _MIX) if use_kernel else _sum_of(words, 1)
    return total + _sum_of(rest, words.numel() + 1) if rest.numel() else total


def _sum_of(words: torch.Tensor, first: int) -> torch.Tensor:
    """Return the sum of `words` mixed with their places, of which the first is `first`."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    places = torch.arange(first, first + min(words.numel(), _WORDS_AT_A_TIME), device=words.device) * _PLACE
    for block in words.split(_WORDS_AT_A_TIME) if words.numel() else ():
        mixed = block + places[: block.numel()]
        mixed ^= mixed >> 29
        mixed *= _MIX
        mixed ^= mixed >> 32
        total = total + mixed.sum()
        places += _signed(_WORDS_AT_A_TIME * _PLACE)
    return total


def _signed(number: int) -> int:
    """Return the number modulo 2^64 as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
