"""The header of a payload, written by the kernel that writes the rest."""

import triton
import triton.language as tl

NOT_FINITE = tl.constexpr(1 << 8)
OVERFLOW = tl.constexpr(1 << 24)
"""Bits of the header's first word: see `ssdtrain.codecs.base`."""


@triton.jit
def write_header(
    payload: tl.tensor, header: tl.tensor, fingerprint: tl.tensor, values: tl.tensor, flags: tl.tensor
) -> None:
    """Write the header of a payload whose first word is zero. Every program calls it, with what it found in `flags`.

    Flags are set by whoever finds them, in any order with the rest.
    """
    words = payload.to(tl.pointer_type(tl.int32), bitcast=True)
    first = tl.program_id(0) == 0
    tl.atomic_or(words, tl.where(first, header, 0) | flags, mask=first | (flags != 0), sem="relaxed")
    if first:
        tl.store(words + 1, fingerprint)
        tl.store(words + 2, values.to(tl.int32))
        tl.store(words + 3, (values.to(tl.int64) >> 32).to(tl.int32))
