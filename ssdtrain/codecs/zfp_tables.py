"""Look-up tables of ZFP's code of bit planes, used by the torch reference and the Triton kernels of `ssdtrain.codecs.zfp`."""

from functools import cache

import torch
from torch import Tensor


def plane_code(significant: int, plane: int) -> tuple[int, int, int]:
    """Code of one bit plane (bit i belongs to coefficient i) after `significant` coefficients have shown a one: bits with the
    first in the lowest place, their number, and the new number of significant coefficients."""
    code, length = plane & (1 << significant) - 1, significant
    n, rest = significant, plane >> significant
    while n < 4:
        code |= (rest != 0) << length
        length += 1
        if not rest:
            break
        while n < 3:
            code |= (rest & 1) << length
            length += 1
            if rest & 1:
                break
            rest >>= 1
            n += 1
        rest >>= 1
        n += 1
    return code, length, n


def plane_of_code(significant: int, bits: int, left: int) -> tuple[int, int, int]:
    """The inverse, given the next bits and how many are `left` before the block's end: plane, bits read, new significant
    count."""
    read = min(significant, left)
    plane = bits & (1 << read) - 1
    n = significant
    while read < left and n < 4:
        group, read = bits >> read & 1, read + 1
        if not group:
            break
        while read < left and n < 3:
            one, read = bits >> read & 1, read + 1
            if one:
                break
            n += 1
        plane |= 1 << n
        n += 1
    return plane, read, n


@cache
def encode_table() -> Tensor:
    """int64 [3, 5 * 16]: code, length, new count for index significant * 16 + plane."""
    rows = [plane_code(n, x) for n in range(5) for x in range(16)]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").t().contiguous()


@cache
def decode_table() -> Tensor:
    """int64 [3, 5 * 8 * 128]: plane, length, new count for index (significant * 8 + min(left, 7)) * 128 + next 7 bits."""
    rows = [plane_of_code(n, b, left) for n in range(5) for left in range(8) for b in range(128)]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").t().contiguous()
