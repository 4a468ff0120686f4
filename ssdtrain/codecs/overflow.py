"""Payloads that hold their tensor in any case, for a caller that may not wait to ask whether they do.

Note: [Values in place of a payload]
    Of an overflow (`base`, Note: [Overflow]) in device memory the host learns when the device gets there. Until then the payload
    has a larger buffer (`room`): where it overflowed, the values follow its header unchanged, over the body and behind it. The
    device does this itself, by a kernel that reads the flag and does nothing else where it is not set.

    A copy of such a buffer to the host would have to be as long as the values. So the same kernel writes what lies behind the
    payload to the host itself, and the copy is as long as the payload: `keep_values`.

    A message has no room behind its payload. There the first values alone are in its place (`kept_values` of them), and the
    sender sends the others when it knows that they are missing.
"""

import torch
from torch import Tensor

from ssdtrain.codecs import kernels
from ssdtrain.codecs.base import HEADER_BYTES, ExactCodec, FixedSizeCodec, align


def room(codec: FixedSizeCodec, numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a buffer for the payload of `numel` values of `dtype`, or for the values behind its header."""
    return max(codec.payload_bytes(numel, dtype), align(HEADER_BYTES + numel * dtype.itemsize))


def kept_values(codec: FixedSizeCodec, numel: int, dtype: torch.dtype) -> int:
    """Return how many of `numel` values have place in a payload of them, behind its header."""
    return min(numel, (codec.payload_bytes(numel, dtype) - HEADER_BYTES) // dtype.itemsize)


def keep_values(codec: ExactCodec, values: Tensor, buf: Tensor, payload_bytes: int, host: int = 0) -> int:
    """Put `values` in place of their payload where that overflowed.

    Args:
        values: contiguous [numel].
        buf: uint8 [`room`] on their device, which starts with their payload.
        payload_bytes: size of the payload.
        host: address of pinned memory that `buf` is copied to next, if kernels of the device can write to it; 0: they cannot.

    Returns:
        How many bytes of `buf` the copy has to have: those of the payload, where what lies behind it gets to `host` by itself.
    """
    flag, integers = codec.overflow_flag(buf), _integers(values)
    target = _values_in(buf, integers)
    if kernels.usable("auto", values):
        first = (payload_bytes - HEADER_BYTES) // integers.itemsize
        kernels.copy_where_set(flag, integers, target, host + payload_bytes if host else 0, first)
        return payload_bytes if host else buf.numel()
    torch.where(flag != 0, integers, target, out=target)
    return buf.numel()


def restore_values(codec: ExactCodec, buf: Tensor, out: Tensor) -> None:
    """Overwrite what was decoded from `buf` into contiguous `out` [numel] by the values, where `keep_values` put them there."""
    flag, integers = codec.overflow_flag(buf), _integers(out)
    source = _values_in(buf, integers)
    if kernels.usable("auto", out):
        kernels.copy_where_set(flag, source, integers)
    else:
        torch.where(flag != 0, source, integers, out=integers)


def _integers(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


def _values_in(buf: Tensor, like: Tensor) -> Tensor:
    return buf[HEADER_BYTES : HEADER_BYTES + like.nbytes].view(like.dtype)
