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

import importlib
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

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


def _launcher(module: str, function: str, at: int) -> Callable[..., Any]:
    """Make the function that calls a function of one of the modules here, on the device of its argument number `at`."""

    def launch(*arguments: Any) -> Any:
        kernels = importlib.import_module(f"{__name__}.{module}")
        with torch.cuda.device_of(arguments[at]):
            return getattr(kernels, function)(*arguments)

    return launch


block_encode, block_decode = _launcher("block", "encode", 1), _launcher("block", "decode", 2)
mask_pack, mask_unpack = _launcher("mask", "pack", 0), _launcher("mask", "unpack", 1)
exact_encode, exact_decode = _launcher("exact", "encode", 0), _launcher("exact", "decode", 1)
rotate, unrotate = _launcher("hadamard", "rotate", 0), _launcher("hadamard", "unrotate", 1)
zfp_encode, zfp_decode = _launcher("zfp", "encode", 0), _launcher("zfp", "decode", 1)
checksum = _launcher("words", "checksum", 0)
_copy_where_set = _launcher("overflow", "copy_where_set", 1)


def copy_where_set(flag: Tensor, source: Tensor, target: Tensor, host: int = 0, first: int = 0) -> None:
    """Copy `source` to `target` where `flag` [1] is not zero, and its values from `first` on also to the address `host`."""
    _copy_where_set(flag, source, target, host, first)
