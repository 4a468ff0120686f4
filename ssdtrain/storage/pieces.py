"""Layout of an operation on a drive, and its division into pieces.

Note: [Image]
    O_DIRECT requires memory addresses, file offsets and lengths in multiples of a 4096-byte block, but a torch CPU tensor
    starts at 64 mod 4096. Therefore the *image* of whole memory blocks is stored:

        page_offset unused bytes (address % 4096) | data | rest of the last block

    Whole blocks are transferred in place. Only the first and the last block go through a bounce buffer, and all three parts
    are one vectored call. Reading into an address with the same page offset is equally cheap; for any other address each
    chunk is copied. `_iopool_transfer.h` is the C version.

An operation is the half-open range [page_offset, page_offset + nbytes) of its image. A slot maps the image onto extents
(queue, offset, length), one per drive; pieces are cut at multiples of the piece size within an extent, so that their ends are
block-aligned.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ssdtrain.storage.memory import ALIGNMENT

WRITE, READ, COPY_IN, COPY_OUT, DEVICE_WRITE, DEVICE_READ = range(6)
"""Kinds of operations. COPY_IN and COPY_OUT copy to and from the host tier, in the direction of a write and a read; the last two
transfer device memory (`ssdtrain.storage.gpudirect`)."""


ERRNO, END_OF_FILE, NOTHING_WRITTEN, EVENT, SOURCE_CHANGED, CORRUPTED = range(6)
"""Meanings of an error code: an errno, a read beyond the end, a write of 0 bytes, the CUDA error of an event, a wrong sample, a
wrong digest."""


class TransferError(Exception):
    """Failure of a piece: a code, its meaning and the offset in the file."""

    def __init__(self, code: int, detail: int, offset: int) -> None:
        super().__init__(code, detail, offset)
        self.code, self.detail, self.offset = code, detail, offset


class Request(NamedTuple):
    """One transfer, as a pool is asked for it: `pool.submit(*request)`.

    Attributes:
        kind: WRITE, READ, COPY_IN, COPY_OUT, DEVICE_WRITE or DEVICE_READ.
        address, nbytes: range of the caller's memory.
        page_offset, extents: place of the image; see Note: [Image].
        event: CUDA event that must complete first; 0: none.
        defer: wake no worker. The operation starts with the next one that is not deferred, on `wait` or on `flush`, or when
            an active worker reaches it.
        checksum: expected sample of a read, or known sample of a write; 0: a write computes it (`memory.sample`).
        digest: expected checksum of all bytes of a read; of a write, other than 0: workers compute it before they write.
            0: none.
    """

    kind: int
    address: int
    nbytes: int
    page_offset: int
    extents: Sequence[int]
    event: int = 0
    defer: bool = False
    checksum: int = 0
    digest: int = 0


class ImagePiece(NamedTuple):
    """Image bytes [start, end) at `offset` in the file of queue `queue`; `start` is block-aligned."""

    queue: int
    offset: int
    start: int
    end: int


def image_bytes(nbytes: int) -> int:
    """Bytes needed for an image of `nbytes` with any page offset."""
    return -(-(nbytes + ALIGNMENT - 1) // ALIGNMENT) * ALIGNMENT


def cut(extents: Sequence[int], page_offset: int, nbytes: int, piece: int) -> Iterator[ImagePiece]:
    """The pieces of an operation; `extents` is flat: queue, offset, length, queue, offset, length, ..."""
    end = page_offset + nbytes
    start = 0
    for at in range(0, len(extents), 3):
        queue, offset, length = extents[at : at + 3]
        limit = min(start + length, end)
        for first in range(start, limit, piece):
            last = min(first + piece, limit)
            if last > page_offset:
                yield ImagePiece(queue, offset + first - start, first, last)
        start += length
