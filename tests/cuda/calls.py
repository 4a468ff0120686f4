"""CUDA's own functions, by name: what they return is the name of the error, as CUDA spells it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import emulated_cuda
import torch

POINTER = ctypes.c_void_p

BLOCKING_STREAM, NON_BLOCKING_STREAM = 0, 1
DISABLE_TIMING = 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
TO_DEVICE, FROM_DEVICE, ANY_DIRECTION = 1, 2, 4


def call(function: str, *arguments: Any, remember: bool = False) -> str:
    """Call a function of the runtime or, with a name `cu...`, of the driver; the name of what it returns.

    Args:
        remember: leave an error to be this thread's last one, which torch would raise at its next kernel.
    """
    runtime = emulated_cuda.runtime()
    library = runtime if function.startswith("cuda") else ctypes.CDLL("libcuda.so.1")
    words = [
        ctypes.c_size_t(word) if isinstance(word, int) and word > 1 << 31 else word for word in arguments
    ]
    code = getattr(library, function)(*words)
    if not remember:
        runtime.cudaGetLastError()
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    return str(runtime.cudaGetErrorName(code).decode())


def ok(function: str, *arguments: Any) -> None:
    """Call a function that must succeed."""
    assert (answer := call(function, *arguments)) == "cudaSuccess", (function, answer)


def last_error() -> str:
    """The last error of this thread, which is forgotten by that."""
    return call("cudaGetLastError", remember=True)


def new_stream(flags: int = NON_BLOCKING_STREAM) -> POINTER:
    stream = POINTER()
    ok("cudaStreamCreateWithFlags", ctypes.byref(stream), flags)
    return stream


def new_event(flags: int = 0) -> POINTER:
    event = POINTER()
    ok("cudaEventCreateWithFlags", ctypes.byref(event), flags)
    return event


def allocate(size: int) -> int:
    address = POINTER()
    ok("cudaMalloc", ctypes.byref(address), size)
    assert address.value
    return address.value


def sleep(milliseconds: float, stream: POINTER | None = None) -> None:
    """Keep a stream busy."""
    if stream is None or not stream.value:
        torch.cuda._sleep(int(milliseconds * 1e6))
    else:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.value)):
            torch.cuda._sleep(int(milliseconds * 1e6))


def process(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, whose device may break."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
