"""The Triton kernel of `ssdtrain.codecs.overflow`: a copy where a flag is set, and next to nothing where it is not."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_VALUES = 4096  # of a program at a time
_PROGRAMS = 256  # they cost more than reading the flag does


@triton.jit(do_not_specialize=["host", "first", "count"])
def _copy_kernel(
    flag: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    host: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    R: tl.constexpr,
    TO_HOST: tl.constexpr,
) -> None:
    """Copy `count` values, and those from `first` on also to the address `host`, which kernels of the device can write to."""
    if tl.load(flag) != 0:
        # In 64 bits: the step after the last one of almost 2^31 values is no number of 32.
        for start in range(tl.program_id(0).to(tl.int64) * R, count, tl.num_programs(0) * R):
            place = start + tl.arange(0, R)
            inside = place < count
            values = tl.load(source + place, mask=inside)
            tl.store(target + place, values, mask=inside)
            if TO_HOST:
                behind = host.to(tl.pointer_type(values.dtype)) + (place - first)
                tl.store(behind, values, mask=inside & (place >= first))


def copy_where_set(flag: Tensor, source: Tensor, target: Tensor, host: int, first: int) -> None:
    """Launch it. `flag` uint8 [1]; `source`, `target` integers [count]; `host` 0: nothing of it goes there."""
    count = source.numel()
    grid = (min(triton.cdiv(count, _VALUES), _PROGRAMS),)
    _copy_kernel[grid](flag, source, target, host, first, count, R=_VALUES, TO_HOST=host != 0)
