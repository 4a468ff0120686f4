"""Triton kernels for tensors in device memory.

What lives here: `block` and `zfp`, kernels that repeat the torch reference operation by operation (division
rounded to nearest, no fused multiply-add, the same Philox words), and `usable`, which decides whether they
run.

What may be imported: the functions below. Triton itself is imported at the first use, never at import.

Without a GPU at hand the kernels were checked in two ways: run by Triton's interpreter they give the bytes of the torch
reference, and compiled for a GPU they hold no fused multiply-add and no approximate division. A test marked `gpu` compares
the bytes on a device; until it has passed there, equality on that device is a goal and not a claim.

What it never does: fall back to another implementation without saying so, or make the host wait for the
device.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from ssdtrain.codecs.base import Key

if TYPE_CHECKING:
    from ssdtrain.codecs.block import IntBlock

_log = logging.getLogger(__name__)


@cache
def _triton_available() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        _log.warning("codecs run in plain torch on the GPU, several times slower: %s", error)
        return False
    return True


def usable(backend: str, *tensors: Tensor) -> bool:
    """Whether the Triton kernels are to be used: on CUDA tensors, or wherever `backend` insists (the
    interpreter runs them on the CPU)."""
    if backend == "triton":
        return True
    return backend == "auto" and all(t.is_cuda for t in tensors) and _triton_available()


def block_encode(codec: IntBlock, flat: Tensor, body: Tensor, key: Key | None) -> Tensor:
    """Encode `flat` [numel] into `body`; returns whether every block is finite, bool []."""
    from ssdtrain.codecs.kernels import block

    return block.encode(codec, flat, body, key)


def block_decode(codec: IntBlock, body: Tensor, out: Tensor, accumulate: bool) -> None:
    """Decode into `out` [numel], or add to it."""
    from ssdtrain.codecs.kernels import block

    block.decode(codec, body, out, accumulate)


def zfp_encode(flat: Tensor, body: Tensor, block_bits: int) -> Tensor:
    """Encode `flat` [numel] into `body`; returns whether every block is finite, bool []."""
    from ssdtrain.codecs.kernels import zfp

    return zfp.encode(flat, body, block_bits)


def zfp_decode(body: Tensor, out: Tensor, block_bits: int, accumulate: bool) -> None:
    """Decode into `out` [numel], or add to it."""
    from ssdtrain.codecs.kernels import zfp

    zfp.decode(body, out, block_bits, accumulate)
