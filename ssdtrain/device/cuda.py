"""A CUDA device: a stream for stores and one for loads, pinned host memory, events."""

from __future__ import annotations

import ctypes
import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ssdtrain.device.bandwidth import copy_bandwidths
from ssdtrain.device.interface import Event, uninitialised
from ssdtrain.device.runtime import address_of, check_cuda, loaded_cuda_runtime, numa_node_of
from ssdtrain.device.timestamps import ORIGIN_PERIOD, CudaTimestamp, Origin, Timestamp
from ssdtrain.patience import Patience

EVENT_POLL = 50e-6  # seconds between two looks at an event that is waited for with a timeout

UNPIN_TIMEOUT = 30.0  # seconds in which nothing of the device ends, after which host memory stays pinned

RECENT = 1024  # events recorded last that show whether the device makes progress

NON_BLOCKING = 1  # cudaStreamNonBlocking: the default stream does not wait for it


class CudaDevice:
    """One CUDA device with a stream for stores and one for loads, so that neither delays the other.

    Args:
        device: the CUDA device; its index is resolved once.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._store_stream = torch.cuda.Stream(self.device)
        self._load_stream = torch.cuda.Stream(self.device)
        self._origin: Origin | None = None  # of timestamps
        self._link: tuple[float, float] | None = None
        self._copies: float | None = None
        self._recent: deque[torch.cuda.Event] = deque(maxlen=RECENT)

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

    def load_target(self, nbytes: int) -> torch.Tensor:
        # The device first: leaving `stream` alone would make a context on the device that was current.
        with torch.cuda.device(self.device), torch.cuda.stream(self._load_stream):
            return uninitialised(nbytes, self.device)

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event | None:
        stream = self._store_stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._copy(source, target, stream)

    def copy_to_device(
        self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()
    ) -> Event | None:
        stream = self._load_stream
        for event in after:
            stream.wait_event(event)  # type: ignore[arg-type]
        return self._copy(source, target, stream)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return self._recorded(stream)

    def load_event(self, after: Sequence[Event]) -> Event | None:
        for event in after:
            self._load_stream.wait_event(event)  # type: ignore[arg-type]
        return self._recorded(self._load_stream)

    def new_stream(self) -> int:
        handle = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            code = loaded_cuda_runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), NON_BLOCKING)
        check_cuda(int(code))
        return handle.value or 0

    def record(self, stream: Any | None) -> Event | None:
        return self._recorded(stream) if stream is not None else None

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # a worker that waits for it sleeps instead of spinning
        event.record(stream)
        self._recent.append(event)
        return event

    def event_handle(self, event: Event | None) -> int:
        return int(event.cuda_event) if event is not None else 0  # type: ignore[attr-defined]

    def wait(self, event: Event, stream: Any | None = None) -> None:
        (stream or torch.cuda.current_stream(self.device)).wait_event(event)  # type: ignore[arg-type]

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

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def wait_stream(self, stream: Any | None) -> None:
        current = torch.cuda.current_stream(self.device)
        if stream is not None and stream != current:
            current.wait_stream(stream)

    def record_use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

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
        for stream in (torch.cuda.current_stream(self.device), self._store_stream, self._load_stream):
            if not patience.wait(functools.partial(self.block, self._recorded(stream))):
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
