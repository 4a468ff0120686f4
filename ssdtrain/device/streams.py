"""Copies and events on the streams of a CUDA device, by calls of its runtime: one call for a copy with its waits and its event.
`_streams.c` is the same in C, for a tenth of the time; this is used where it was not built."""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from ssdtrain.device.interface import Event
from ssdtrain.device.runtime import address_of, check_cuda, loaded_cuda_runtime

__all__ = ["NO_STREAM", "TO_DEVICE", "TO_HOST", "WITHIN", "PythonStreams", "Streams", "make_streams"]

logger = logging.getLogger("ssdtrain")

TO_DEVICE, TO_HOST, WITHIN = 1, 2, 3
"""Kinds of copies (cudaMemcpyKind): from the host, to the host, within the device."""

NO_STREAM = (1 << 64) - 1
"""No raw stream: 0 is the default one."""

NOT_READY = 600
"""cudaErrorNotReady."""

EVENT_FLAGS = 3
"""Events without time, for which a thread that waits sleeps."""

FUNCTIONS = (
    "cudaEventCreateWithFlags",
    "cudaEventDestroy",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaStreamWaitEvent",
    "cudaMemcpyAsync",
    "cudaGetDevice",
    "cudaGetLastError",
)


class Streams(Protocol):
    """Copies and events of one device, on raw streams. Handles of events are used again, since a new one takes longer than to
    record it; a wait that was queued has its own copy of what was recorded. Where another device is current, on which handles
    would be made and whose default stream 0 would be, the methods do nothing and return None or False."""

    def record(self, stream: int) -> Event | None:
        """An event behind all work of `stream`."""

    def wait(self, stream: int, event: Event) -> bool:
        """Let `stream` wait for `event`."""

    def follow(self, stream: int, other: int) -> bool:
        """Let `stream` wait for all work of `other` so far."""

    def copy(
        self,
        source: int,
        target: int,
        nbytes: int,
        kind: int,
        stream: int,
        producer: int = NO_STREAM,
        after: Sequence[Event] = (),
    ) -> Event | None:
        """Queue a copy of one of the kinds above on `stream`, behind all work of the stream `producer` so far and the events
        `after`. Returns the event behind it."""


def make_streams(device: int) -> Streams:
    """Make the streams in C where that was built, else in Python with one warning."""
    runtime = loaded_cuda_runtime()
    try:
        native = importlib.import_module("ssdtrain.device._streams")
    except ImportError as error:
        logger.warning("the C extension for copies was not built (%s): hooks on CUDA take longer", str(error))
        return PythonStreams(device, runtime)
    addresses = tuple(address_of(getattr(runtime, name)) for name in FUNCTIONS)
    made: Streams = native.Streams(device, addresses)
    return made


class _PythonEvent:
    """An event of `PythonStreams`."""

    def __init__(self, streams: PythonStreams) -> None:
        self._streams = streams
        self.cuda_event = streams.idle.pop()

    def __del__(self) -> None:
        self._streams.idle.append(self.cuda_event)

    def query(self) -> bool:
        code = int(self._streams.runtime.cudaEventQuery(ctypes.c_void_p(self.cuda_event)))
        if code == NOT_READY:
            self._streams.runtime.cudaGetLastError()  # else torch raises it at the next kernel
            return False
        check_cuda(code)
        return True

    def synchronize(self) -> None:
        check_cuda(self._streams.runtime.cudaEventSynchronize(ctypes.c_void_p(self.cuda_event)))


class PythonStreams:
    """See `Streams`.

    Args:
        device: index.
        runtime: that torch uses.
    """

    def __init__(self, device: int, runtime: Any) -> None:
        self.runtime = runtime
        self.idle: list[int] = []  # handles that no event holds; they stay until the process ends
        self._device = device

    def _is_current(self) -> bool:
        current = ctypes.c_int(-1)
        check_cuda(self.runtime.cudaGetDevice(ctypes.byref(current)))
        return current.value == self._device

    def record(self, stream: int) -> Event | None:
        if not self._is_current():
            return None
        if not self.idle:
            handle = ctypes.c_void_p()
            check_cuda(self.runtime.cudaEventCreateWithFlags(ctypes.byref(handle), EVENT_FLAGS))
            self.idle.append(handle.value or 0)
        event = _PythonEvent(self)
        check_cuda(self.runtime.cudaEventRecord(ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(stream)))
        return event

    def wait(self, stream: int, event: Event) -> bool:
        if not self._is_current():
            return False
        handle = ctypes.c_void_p(event.cuda_event)  # type: ignore[attr-defined]
        check_cuda(self.runtime.cudaStreamWaitEvent(ctypes.c_void_p(stream), handle, 0))
        return True

    def follow(self, stream: int, other: int) -> bool:
        if stream == other:
            return True
        event = self.record(other)
        return event is not None and self.wait(stream, event)

    def copy(
        self,
        source: int,
        target: int,
        nbytes: int,
        kind: int,
        stream: int,
        producer: int = NO_STREAM,
        after: Sequence[Event] = (),
    ) -> Event | None:
        if not self._is_current():
            return None
        if producer != NO_STREAM:
            self.follow(stream, producer)
        for event in after:
            self.wait(stream, event)
        places = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(nbytes)
        check_cuda(self.runtime.cudaMemcpyAsync(*places, kind, ctypes.c_void_p(stream)))
        return self.record(stream)
