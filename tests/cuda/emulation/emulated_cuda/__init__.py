"""A CUDA device without a GPU: torch's own CUDA build on a runtime over host memory. See README.md beside this folder.

Importing this loads the emulated `libcudart` and `libcuda` before torch can load others; `emulated_cuda.pth` in the environment
does so when Python starts. `start`, which torch calls at the end of its import, registers the operators. No program of the
environment needs a line for it. Never imported by `ssdtrain`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LIBRARIES", "active", "counts", "host_waits", "setting", "settings", "start"]

LIBRARIES = Path(sys.prefix) / "emulated_cuda"
"""Folder of the built libraries. Each `lib*.so.*` there is loaded in place of NVIDIA's."""

_runtime: ctypes.CDLL | None = None
_operators: ctypes.CDLL | None = None


def _load() -> ctypes.CDLL | None:
    """Load the libraries of the driver and the runtime, whose names torch's then find taken."""
    if os.environ.get("EMULATED_CUDA") == "0" or not (LIBRARIES / "libcudart.so.13").exists():
        return None
    # torch asks NVML for the devices where it is told to; there is none here.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    runtime = ctypes.CDLL(str(LIBRARIES / "libcudart.so.13"), mode=ctypes.RTLD_GLOBAL)
    for library in sorted(LIBRARIES.glob("lib*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    runtime.emulated_counts.argtypes = [ctypes.c_char_p, ctypes.c_long]
    runtime.emulated_counts.restype = ctypes.c_long
    runtime.emulated_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    runtime.emulated_get.argtypes = [ctypes.c_char_p]
    runtime.emulated_get.restype = ctypes.c_double
    runtime.emulated_host_address.argtypes = [ctypes.c_void_p]
    runtime.emulated_host_address.restype = ctypes.c_void_p
    return runtime


_runtime = _load()


def start() -> None:
    """Register the operators; called by torch (entry point `torch.backends`)."""
    global _operators
    if _runtime is None or _operators is not None:
        return
    import atexit

    import torch

    _operators = ctypes.CDLL(str(LIBRARIES / "emulated_operators.so"))
    _operators.emulated_install_operators()
    # Kernels of cuDNN are not there; torch has its own operators for each.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    atexit.register(_runtime.emulated_stop)


def active() -> bool:
    """Whether torch runs on the emulated device."""
    return _operators is not None


def runtime() -> ctypes.CDLL:
    """The emulated runtime, for its exported functions.

    Raises:
        RuntimeError: this process does not run on it.
    """
    if _runtime is None:
        raise RuntimeError(
            f"the emulated CUDA runtime is not loaded (EMULATED_CUDA=0, or {LIBRARIES} was not built)"
        )
    return _runtime


def counts() -> dict[str, int]:
    """Counts since the start of the process: calls of CUDA by name, `wait:CALL@THREAD`, `bytes:h2d`, `bytes:d2h`, `bytes:d2d`,
    `pageable copies`, `synchronous operators`, `refused call:NAME`, `refused kernel:NAME`."""
    size = runtime().emulated_counts(None, 0)
    text = ctypes.create_string_buffer(size + 4096)
    runtime().emulated_counts(text, len(text))
    pairs = (line.rpartition("=") for line in text.value.decode().splitlines())
    return {name: int(number) for name, _, number in pairs}


def host_waits(
    before: dict[str, int], after: dict[str, int] | None = None, threads: tuple[str, ...] = ()
) -> dict[str, int]:
    """Calls between two counts in which a thread of the host waited for the device, by `CALL@THREAD`.

    Args:
        threads: prefixes of thread names to leave out.
    """
    after = counts() if after is None else after
    waits = {
        name.removeprefix("wait:"): number - before.get(name, 0)
        for name, number in after.items()
        if name.startswith("wait:") and number > before.get(name, 0)
    }
    return {
        name: number
        for name, number in waits.items()
        if not name.partition("@")[2].startswith(threads or "\0")
    }


def setting(name: str) -> float:
    """The value of a setting: `EMULATED_<NAME>`, in lower case without the prefix."""
    return float(runtime().emulated_get(name.encode()))


@contextmanager
def settings(**values: float) -> Iterator[None]:
    """Change settings inside of the block.

    Raises:
        KeyError: there is no such setting, or it cannot be changed while the process runs.
    """
    before = {name: setting(name) for name in values}
    try:
        for name, value in values.items():
            if runtime().emulated_set(name.encode(), float(value)):
                raise KeyError(name)
        yield
    finally:
        for name, value in before.items():
            runtime().emulated_set(name.encode(), value)
