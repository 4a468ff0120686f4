"""Triton kernels for tensors in device memory.

What lives here: `block` and `zfp`, kernels that repeat the torch reference operation by operation (division
rounded to nearest, no fused multiply-add, the same Philox words), and `usable`, which decides whether they
run.

What may be imported: the functions below. Triton itself is imported at the first use, never at import.

What it never does: fall back to another implementation without saying so, or make the host wait for the
device.
"""

import logging
from functools import cache

from torch import Tensor

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
