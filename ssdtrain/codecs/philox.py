"""Philox4x32-10 in plain torch: random words as a function of a key and a counter, with no state.

The generator of J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), table 2. The C
and Triton implementations of the codecs draw the same words.
"""

import torch
from torch import Tensor

from ssdtrain.codecs.base import Key

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: Tensor, key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words in [0, 2^32) for each value of `counter`, all int64 in the shape of `counter`.

    The 128-bit counter is (counter, step, tensor, rank), the 64-bit key is the seed. A word of the key may be an int64 tensor
    that broadcasts to the shape of `counter`: many keys in one call.
    """
    c0 = counter & _MASK
    c1, c2, c3 = (torch.zeros_like(c0) + (word & _MASK) for word in (key.step, key.tensor, key.rank))
    k0, k1 = key.seed & _MASK, key.seed >> 32 & _MASK
    for _ in range(10):
        # The product wraps in int64; its bits 32 to 63 are right all the same.
        p0, p2 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = ((p2 >> 32 & _MASK) ^ c1 ^ k0, p2 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform_blocks(blocks: int, block: int, key: Key, device: torch.device) -> Tensor:
    """Uniform numbers k / 2^24 in [0, 1), float32 [blocks, block].

    Word j of counter (b * block / 4 + p) belongs to position j * block / 4 + p of block b: four contiguous
    quarters, which is also how two- and four-bit codes are packed, so that vector units and GPU lanes use all
    four words where they are made.
    """
    quarter = block // 4
    counter = torch.arange(blocks * quarter, dtype=torch.int64, device=device).view(blocks, quarter)
    words = torch.stack(philox(counter, key), dim=1).view(blocks, block)
    return (words >> 8).to(torch.float32) * 2.0**-24
