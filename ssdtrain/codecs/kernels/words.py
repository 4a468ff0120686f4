"""The Triton kernel of `ssdtrain.state.checksum`: all words mixed with their places, each read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 4096  # of a program at a time
_PROGRAMS = 1024


@triton.jit(do_not_specialize=["count"])
def _checksum_kernel(
    words: tl.tensor,
    sums: tl.tensor,
    count: tl.tensor,
    PLACE: tl.constexpr,
    MIX: tl.constexpr,
    W: tl.constexpr,
) -> None:
    """Write what this program's words come to, int64; see `ssdtrain.state.checksum.checksum`."""
    total_W = tl.zeros([W], dtype=tl.int64)
    for start in range(tl.program_id(0) * W, count, tl.num_programs(0) * W):
        at_W = start + tl.arange(0, W)
        inside = at_W < count
        mixed_W = tl.load(words + at_W, mask=inside, other=0) + (at_W.to(tl.int64) + 1) * PLACE
        mixed_W = (mixed_W ^ (mixed_W >> 29)) * MIX
        mixed_W = mixed_W ^ (mixed_W >> 32)
        total_W += tl.where(inside, mixed_W, 0)
    tl.store(sums + tl.program_id(0), tl.sum(total_W, axis=0))


def checksum(words: Tensor, place: int, mix: int) -> Tensor:
    """Return the sum of `words` int64 [count], mixed; int64 []."""
    programs = min(triton.cdiv(words.numel(), _WORDS), _PROGRAMS)
    sums = torch.empty(programs, dtype=torch.int64, device=words.device)
    _checksum_kernel[(programs,)](words, sums, words.numel(), PLACE=place, MIX=mix, W=_WORDS)
    return sums.sum()
