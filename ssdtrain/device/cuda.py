"""A CUDA device: a stream for stores and one for loads, pinned host memory, events."""

from __future__ import annotations

import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ssdtrain.device.bandwidth import copy_bandwidths
from ssdtrain.device.interface import Event, uninitialised
from ssdtrain.device.runtime import (
    address_of,
    check_cuda,
    is_capturing,
    loaded_cuda_runtime,
    numa_node_of,
    on_stream,
    raw_current_stream,
)
from ssdtrain.device.streams import NO_STREAM, TO_DEVICE, TO_HOST, WITHIN, make_streams
from ssdtrain.device.timestamps import ORIGIN_PERIOD, CudaTimestamp, Origin, Timestamp
from ssdtrain.patience import Patience

EVENT_POLL = 50e-6  # seconds between two looks at an event that is waited for with a timeout

UNPIN_TIMEOUT = 30.0  # seconds in which nothing of the device ends, after which host memory stays pinned

_RECENT = 1024  # events recorded last that show whether the device makes progress

HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem

NON_BLOCKING = 1  # cudaStreamNonBlocking: the default stream does not wait for it


class _CurrentStreams(dict[int, torch.cuda.Stream]):
    """torch's objects of streams that were current, by handle: to make one takes longer than a hook does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __missing__(self, handle: int) -> torch.cuda.Stream:
        stream = self[handle] = torch.cuda.current_stream(self._device)
        return stream


class CudaDevice:
    """One CUDA device with a stream for stores and one for loads, so that neither delays the other.

    Args:
        device: the CUDA device; its index is resolved once.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._index = index
        self._streams = make_streams(index)
        self._store_stream = torch.cuda.Stream(self.device)
        self._load_stream = torch.cuda.Stream(self.device)
        self._store = int(self._store_stream.cuda_stream)
        self._load = int(self._load_stream.cuda_stream)
        self._torch_streams = _CurrentStreams(self.device)
        self._origin: Origin | None = None  # of timestamps
        self._link: tuple[float, float] | None = None
        self._copies: float | None = None
        self._recent: deque[Event] = deque(maxlen=_RECENT)
        self.capturing = is_capturing
        self.current_stream: Callable[[], int] = functools.partial(raw_current_stream, index)

    def timestamp(self) -> Timestamp:
        stream = torch.cuda.current_stream(self.device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        origin = self._origin
        if origin is None or time.monotonic() - origin.made > ORIGIN_PERIOD:
            timestamp = None if origin is None else CudaTimestamp(origin, event)
            origin = self._origin = Origin(event, timestamp)
        return CudaTimestamp(origin, event)

    def link_bandwidth(self) -> tuple[float, float]:
        if self._link is None:
            to_host, from_host, self._copies = copy_bandwidths(self.device)
            self._link = to_host, from_host
        return self._link

    def copy_bandwidth(self) -> float | None:
        self.link_bandwidth()  # together, since later there may be no memory for it
        return self._copies

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def load_target(self, nbytes: int) -> torch.Tensor:
        with on_stream(self._load_stream):
            return uninitialised(nbytes, self.device)

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def copy_to_host(self, source: int, target: int, nbytes: int) -> Event | None:
        copy, current = self._streams.copy, raw_current_stream(self._index)
        event = copy(source, target, nbytes, TO_HOST, self._store, current)
        if event is None:
            event = self._made_current(copy, source, target, nbytes, TO_HOST, self._store, current)
        self._recent.append(event)
        return event

    def copy_to_device(
        self, source: int, target: int, nbytes: int, after: Sequence[Event] = (), *, within: bool = False
    ) -> Event | None:
        request = source, target, nbytes, WITHIN if within else TO_DEVICE, self._load, NO_STREAM, after
        event = self._streams.copy(*request) or self._made_current(self._streams.copy, *request)
        self._recent.append(event)
        return event

    def _made_current(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call it again, which did nothing because another device was current, with this one."""
        with torch.cuda.device(self.device):
            done = call(*arguments)
        assert done
        return done

    def load_event(self, after: Sequence[Event]) -> Event | None:
        for event in after:
            self.wait(event, self._load)
        return self.record(self._load)

    def new_stream(self) -> int:
        handle = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            code = loaded_cuda_runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), NON_BLOCKING)
        check_cuda(int(code))
        return handle.value or 0

    def record(self, stream: Any | None) -> Event | None:
        if stream is None:
            return None
        event = self._streams.record(stream) or self._made_current(self._streams.record, stream)
        self._recent.append(event)
        return event

    def event_handle(self, event: Event | None) -> int:
        return int(event.cuda_event) if event is not None else 0  # type: ignore[attr-defined]

    def wait(self, event: Event, stream: Any | None = None) -> None:
        stream = raw_current_stream(self._index) if stream is None else stream
        if not self._streams.wait(stream, event):
            self._made_current(self._streams.wait, stream, event)

    def block(self, event: Event, timeout: float | None = None) -> bool:
        if timeout is None:
            event.synchronize()
            return True
        until = time.monotonic() + timeout
        while not event.query():
            if time.monotonic() >= until:
                return False
            time.sleep(EVENT_POLL)
        return True

    def progress(self) -> int:
        return sum(event.query() for event in [*self._recent])

    def wait_stream(self, stream: Any | None) -> None:
        current = raw_current_stream(self._index)
        if stream is None or stream == current:
            return
        if not self._streams.follow(current, stream):
            self._made_current(self._streams.follow, current, stream)

    def record_use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._torch_streams[raw_current_stream(self._index)])

    def writes_pinned(self) -> bool:
        value = ctypes.c_int()
        code = loaded_cuda_runtime().cudaDeviceGetAttribute(ctypes.byref(value), HOST_POINTER, self._index)
        check_cuda(int(code))
        return bool(value.value)

    def host_register(self) -> Any:
        runtime = torch.cuda.cudart()

        def register(address: int, nbytes: int) -> Any:
            with torch.cuda.device(self.device):  # else a context appears on the current device
                check_cuda(int(runtime.cudaHostRegister(address, nbytes, 0)))

            def unregister() -> None:
                with torch.cuda.device(self.device):
                    self._wait_for_copies()
                    check_cuda(int(runtime.cudaHostUnregister(address)))

            return unregister

        return register

    def _wait_for_copies(self) -> None:
        """Wait for the copies that may use pinned memory, and for what computes: behind a collective whose peer is gone both, and
        cudaHostUnregister, would wait for ever.

        Raises:
            TimeoutError: nothing has ended for `UNPIN_TIMEOUT` seconds.
        """
        patience = Patience(UNPIN_TIMEOUT, self.progress)
        for stream in (raw_current_stream(self._index), self._store, self._load):
            event = self.record(stream)
            if event is not None and not patience.wait(functools.partial(self.block, event)):
                raise TimeoutError(
                    f"no work of {self.device} has ended for {UNPIN_TIMEOUT:g} s (a collective whose peer is gone?)"
                )

    def numa_node(self) -> int | None:
        return numa_node_of(torch.cuda.get_device_properties(self.device))

    def event_functions(self) -> dict[str, int]:
        runtime = loaded_cuda_runtime()
        return {
            "event_query": address_of(runtime.cudaEventQuery),
            "set_device": address_of(runtime.cudaSetDevice),
            "exchange_capture_mode": address_of(runtime.cudaThreadExchangeStreamCaptureMode),
            "device": self.device.index,
        }
