"""The CUDA runtime that torch has loaded: functions that torch.cuda does not offer, errors, where a device is attached, and which
one is current."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "address_of",
    "check_cuda",
    "is_capturing",
    "loaded_cuda_runtime",
    "made_current",
    "numa_node_of",
    "on_stream",
    "raw_current_stream",
]

logger = logging.getLogger("ssdtrain")


def _raw_current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_current_stream)
"""Returns the handle of the current stream of a CUDA device, by its index."""

is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Returns whether the current stream is being captured into a graph."""


class on_stream:
    """A context manager: `stream` is the current one of its device inside, and the device too. Where that is the current device,
    which it nearly always is, torch's own managers take many times as long."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        index: int = stream.device_index
        if _set_stream_of is None or _current_device() != index:
            # The device first: leaving `stream` alone would make a context on the device that was current.
            self._before: Any = ExitStack()
            self._before.enter_context(torch.cuda.device(index))
            self._before.enter_context(torch.cuda.stream(stream))
        else:
            self._before = _current_stream(index)
            _set_stream(stream.stream_id, index, stream.device_type)

    def __exit__(self, *exception: object) -> None:
        if isinstance(self._before, ExitStack):
            self._before.close()
        else:
            _set_stream(*self._before)


_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
_set_stream_of: Any = getattr(torch._C, "_cuda_setStream", None)


def _set_stream(stream: int, device: int, kind: int) -> None:
    _set_stream_of(stream_id=stream, device_index=device, device_type=kind)


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def loaded_cuda_runtime(maps: Path = Path("/proc/self/maps")) -> ctypes.CDLL:
    """The CUDA runtime that torch uses; events are not valid in another copy of it, which another package may have loaded too.

    Raises:
        OSError: torch has not loaded it as a shared library, or /proc is not mounted.
    """
    try:
        text = maps.read_text()
    except FileNotFoundError as error:
        raise OSError(
            f"{maps} is not there, which says where torch's CUDA runtime is: mount /proc in the container"
        ) from error
    return ctypes.CDLL(_cuda_runtime_path(text))


def _cuda_runtime_path(maps: str) -> str:
    """Find, in the text of /proc/self/maps, torch's own library, by which its symbols are found in the runtime that it is linked
    with; else the only runtime there is.

    Raises:
        OSError: as `loaded_cuda_runtime`.
    """
    paths = [line.split(maxsplit=5)[-1] for line in maps.splitlines()]
    paths = list(dict.fromkeys(path for path in paths if path.startswith("/")))
    runtimes = [path for path in paths if "libcudart" in Path(path).name]
    if not runtimes:
        raise OSError(
            "torch.cuda is in use, but no libcudart is loaded in this process: is torch linked statically to it?"
        )
    if len(runtimes) == 1:
        return runtimes[0]
    return next((path for path in paths if Path(path).name == "libc10_cuda.so"), runtimes[0])


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """`device` is the current one inside, if it is a CUDA device. Collectives of objects send from the current device, which is
    the first one for all ranks of a node where a script names its device and makes none current: NCCL refuses that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_cuda(code: int) -> None:
    """Raise `torch.cuda.CudaError` for the code of a runtime call that failed.

    The runtime also remembers the error for this thread, and torch reads it at the next kernel launch, which would fail instead
    where the caller can do without this call. So it is cleared.
    """
    if not code:
        return
    try:
        loaded_cuda_runtime().cudaGetLastError()
    except OSError as unknown:
        logger.warning("the last error of the CUDA runtime is not cleared: %s", str(unknown))
    torch.cuda.check_error(code)


def numa_node_of(properties: Any, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node of the PCI slot that torch's device properties name; None where the system or this torch does not say."""
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    name = f"{properties.pci_domain_id:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    path = sysfs / "bus/pci/devices" / name / "numa_node"
    node = int(path.read_text()) if path.exists() else -1
    return node if node >= 0 else None
