"""Triton kernels for tensors in device memory.

Each kernel repeats the torch reference operation by operation: division rounded to nearest, no fused multiply-add, the same
Philox words. `usable` decides whether they are used. Triton is imported at first use. Kernels do not depend on codec classes:
they take a `BlockFormat` or plain numbers, so that codecs import kernels and not the reverse.

Verification without a GPU: in Triton's interpreter the kernels produce the bytes of the torch reference, and the compiled code
contains no fused multiply-add and no approximate division. A test marked `gpu` compares the bytes on a device; bit-equality is
claimed only where it has passed.

Triton launches on the current device, whatever device the tensors are of: so that is made the current one.

The kernels never make the host wait for the device, and there is no silent fallback.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch
from torch import Tensor

from ssdtrain.codecs.base import Header, Key, Pieces
from ssdtrain.codecs.scales import BlockFormat

_log = logging.getLogger(__name__)


@cache
def _triton_available() -> bool:
    """Whether Triton is there and can start: it builds its driver with a C compiler, which an image for training may lack."""
    try:
        import triton

        if os.environ.get("TRITON_INTERPRET") != "1":  # Triton's interpreter needs neither
            triton.runtime.driver.active.get_current_target()
    except Exception as error:  # noqa: BLE001 - of the compiler, of the driver's library or of Triton; plain torch gives the same bits
        _log.warning(
            "codecs run in plain torch on the GPU, several times slower, because Triton cannot start: %s",
            error,
        )
        return False
    return True


def compiled() -> bool:
    """Whether there are Triton kernels, and not its interpreter."""
    return os.environ.get("TRITON_INTERPRET") != "1" and _triton_available()


def usable(backend: str, *tensors: Tensor) -> bool:
    """Whether to use the Triton kernels: for CUDA tensors, or if `backend` is "triton" (interpreted on the CPU)."""
    if backend == "triton":
        return True
    return backend == "auto" and all(t.is_cuda for t in tensors) and _triton_available()


def block_encode(
    codec: BlockFormat,
    flat: Tensor,
    payload: Tensor,
    header: Header,
    key: Key | None,
    source: torch.dtype,
    pieces: Pieces | None = None,
) -> None:
    """Encode `flat` [numel], or several pieces of that size, into `payload`, headers and finite flags included."""
    from ssdtrain.codecs.kernels import block

    with torch.cuda.device_of(flat):
        block.encode(codec, flat, payload, header, key, source, pieces)


def block_decode(codec: BlockFormat, body: Tensor, out: Tensor, accumulate: bool) -> None:
    """Decode into `out` [numel], or add to it."""
    from ssdtrain.codecs.kernels import block

    with torch.cuda.device_of(out):
        block.decode(codec, body, out, accumulate)


def mask_pack(flat: Tensor, packed: Tensor) -> None:
    """Write bool `flat` [numel] to the bits of `packed` [numel / 8, rounded up]."""
    from ssdtrain.codecs.kernels import mask

    with torch.cuda.device_of(flat):
        mask.pack(flat, packed)


def mask_unpack(packed: Tensor, out: Tensor) -> None:
    """Write the bits of `packed` to bool `out` [numel]."""
    from ssdtrain.codecs.kernels import mask

    with torch.cuda.device_of(out):
        mask.unpack(packed, out)


def exact_encode(flat: Tensor, payload: Tensor, header: Header, pieces: Pieces | None = None) -> bool:
    """Encode `flat` [numel], or several pieces of that size, into `payload`, headers and flags included; False if it was not
    done: pieces that are not aligned."""
    from ssdtrain.codecs.kernels import exact

    with torch.cuda.device_of(flat):
        return exact.encode(flat, payload, header, pieces)


def exact_decode(body: Tensor, out: Tensor) -> None:
    """Decode into `out` [whole groups of 512]."""
    from ssdtrain.codecs.kernels import exact

    with torch.cuda.device_of(out):
        exact.decode(body, out)


def rotate(flat: Tensor, rotated: Tensor, signs: Tensor, unit: float) -> None:
    """Hadamard rotation of blocks as long as `signs`; `rotated` is float32, padded to whole blocks."""
    from ssdtrain.codecs.kernels import hadamard

    with torch.cuda.device_of(flat):
        hadamard.rotate(flat, rotated, signs, unit)


def unrotate(rotated: Tensor, out: Tensor, signs: Tensor, unit: float, accumulate: bool) -> None:
    """The inverse into `out` [numel], or onto it."""
    from ssdtrain.codecs.kernels import hadamard

    with torch.cuda.device_of(out):
        hadamard.unrotate(rotated, out, signs, unit, accumulate)


def checksum(words: Tensor, place: int, mix: int) -> Tensor:
    """Return the sum of `words` int64 [count], each mixed with its place; int64 []."""
    from ssdtrain.codecs.kernels import words as kernel

    with torch.cuda.device_of(words):
        return kernel.checksum(words, place, mix)


def copy_where_set(flag: Tensor, source: Tensor, target: Tensor, host: int = 0, first: int = 0) -> None:
    """Copy `source` to `target` where `flag` [1] is not zero, and its values from `first` on also to the address `host`."""
    from ssdtrain.codecs.kernels import overflow

    with torch.cuda.device_of(source):
        overflow.copy_where_set(flag, source, target, host, first)


def zfp_encode(flat: Tensor, body: Tensor, block_bits: int) -> Tensor:
    """Encode `flat` [numel] into `body`; returns whether every block is finite, bool []."""
    from ssdtrain.codecs.kernels import zfp

    with torch.cuda.device_of(flat):
        return zfp.encode(flat, body, block_bits)


def zfp_decode(body: Tensor, out: Tensor, block_bits: int, accumulate: bool) -> None:
    """Decode into `out` [numel], or add to it."""
    from ssdtrain.codecs.kernels import zfp

    with torch.cuda.device_of(out):
        zfp.decode(body, out, block_bits, accumulate)
