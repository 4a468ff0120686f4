"""How the bytes of one operation lie on a drive, and how they are cut into pieces.

Note: [Image] A file opened with O_DIRECT takes memory, offsets and lengths in multiples of a block of 4096
bytes; a torch CPU tensor starts at 64 mod 4096. So what is stored is the image of whole memory blocks: `lead`
unused bytes (`address % 4096`), the data, and the rest of the last block. Every whole block inside goes from
where it lies; only the first and the last block pass through a bounce buffer, and all three are one vectored
call. Reading into an address with the same lead is as cheap; into any other, each chunk is copied.
`_iopool_transfer.h` does the same in C.

An operation is a half-open range [lead, lead + nbytes) of its image. A slot maps the image onto extents
(queue, offset, length), one per drive, and pieces are cut at multiples of the piece size inside an extent, so
that their ends are block-aligned.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ssdtrain.storage.memory import ALIGNMENT

WRITE, READ, COPY_IN, COPY_OUT = range(4)
"""Kinds of operations. The last two are memcpy to and from the host tier, in the direction of write and read.
"""


class Piece(NamedTuple):
    """Image bytes [start, end) at `offset` of queue `queue`'s file; `start` is block-aligned."""

    queue: int
    offset: int
    start: int
    end: int


def image_bytes(nbytes: int) -> int:
    """Space for an image of `nbytes` with any lead, in bytes."""
    return -(-(nbytes + ALIGNMENT - 1) // ALIGNMENT) * ALIGNMENT


def cut(extents: Sequence[int], lead: int, nbytes: int, piece: int) -> Iterator[Piece]:
    """The pieces of an operation; `extents` is flat: queue, offset, length, queue, offset, length, ..."""
    end = lead + nbytes
    start = 0
    for at in range(0, len(extents), 3):
        queue, offset, length = extents[at : at + 3]
        limit = min(start + length, end)
        for first in range(start, limit, piece):
            last = min(first + piece, limit)
            if last > lead:
                yield Piece(queue, offset + first - start, first, last)
        start += length
