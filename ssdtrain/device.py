"""Streams, events and copies of a device; no-ops on the CPU.

The engine copies between device memory and pinned host buffers on side streams. Three rules ensure correctness, each known from
a data corruption in other projects:

- The current stream is resolved at each use, on the calling thread, and never inside a `with stream:` block (torchtitan #2581).
- A side stream waits for an event of the producing stream before it reads the data. A restore target is allocated on the load
  stream and written after the event of the previous user of its memory (`ssdtrain.offload.targets`).
- Memory is kept alive by a reference until the event has completed. `record_stream` is only used with the stream that saves a
  tensor (`record_use`): for memory that this stream allocated it does nothing, and for memory of another stream it is needed.
  With the side streams it would make reuse, and therefore the peak, depend on timing.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ssdtrain.bandwidth import copy_bandwidths, host_copy_bandwidth
from ssdtrain.cuda_runtime import address_of, check_cuda, loaded_cuda_runtime, numa_node_of
from ssdtrain.patience import Patience
from ssdtrain.timestamps import ORIGIN_PERIOD, CudaTimestamp, HostTimestamp, Origin, Timestamp

__all__ = ["CpuDevice", "CudaDevice", "Device", "Event", "HostTimestamp", "Timestamp", "device_for"]


logger = logging.getLogger("ssdtrain")

EVENT_POLL = 50e-6  # seconds between two looks at an event that is waited for with a timeout

UNPIN_TIMEOUT = 30.0  # seconds in which nothing of the device ends, after which host memory stays pinned

RECENT = 1024  # events recorded last that show whether the device makes progress

NON_BLOCKING = 1  # cudaStreamNonBlocking: the default stream does not wait for it

TESTED_TORCH = ("2.13.0", "2.14.1", "2.15.0")


@functools.cache
def warn_of_untested_torch() -> None:
    """Warn once if this torch version was not tested with this version of SSDTrain."""
    version = torch.__version__.partition("+")[0]
    if version not in TESTED_TORCH:
        logger.warning(
            "torch %s was not tested with this version of SSDTrain (tested: %s)",
            version,
            ", ".join(TESTED_TORCH),
        )


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Device(Protocol):
    """Device operations that the engine uses."""

    kind: str

    def timestamp(self) -> Timestamp:
        """When the current stream comes to what it is given next."""

    def link_bandwidth(self) -> tuple[float, float] | None:
        """Bytes per second of copies to the host and from it, measured at the first call, which blocks the host; None where
        there is no link."""

    def copy_bandwidth(self) -> float | None:
        """Bytes per second of a copy within the memory that tensors are in, measured at the first call, which blocks the host;
        None: not known."""

    def load_target(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes of the device (uint8), allocated on the load stream. See `ssdtrain.offload.targets`."""

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of `source` (device, uint8) in device memory, allocated and made on the current stream."""

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event | None:
        """Queue the copy of `source` (device, uint8) into `target` (pinned host, uint8) after the current stream's work."""

    def copy_to_device(
        self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()
    ) -> Event | None:
        """Queue the copy of `source` (pinned host, or the device's) into `target`, which `load_target` made, once the events have
        passed."""

    def load_event(self, after: Sequence[Event]) -> Event | None:
        """An event behind the events `after` and all work queued on the load stream: memory that `load_target` made may be
        written then."""

    def new_stream(self) -> int:
        """A stream that nothing else uses, as a raw handle; 0 without streams. It is never destroyed."""

    def record(self, stream: Any | None) -> Event | None:
        """Record an event after all work queued on `stream` so far."""

    def event_handle(self, event: Event | None) -> int:
        """The raw event handle for the I/O pool; 0 without events."""

    def wait(self, event: Event, stream: Any | None = None) -> None:
        """Make `stream` (None: the current one) wait for `event`, without blocking the host."""

    def block(self, event: Event, timeout: float | None = None) -> bool:
        """Block the host until `event`: back-pressure when the engine has run out of buffers.

        Returns:
            False: `timeout` seconds have passed before it.
        """

    def progress(self) -> int:
        """Another number than before if some work of the device has ended since."""

    def current_stream(self) -> Any | None:
        """The current stream; None without streams."""

    def wait_stream(self, stream: Any | None) -> None:
        """Make the current stream wait for all work queued on `stream` so far, if they differ."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor`, if another stream allocated it, is not reused before the work that is queued on the current
        stream when it is freed. Does nothing for memory that the current stream allocated."""

    def capturing(self) -> bool:
        """True while the current stream is being captured into a graph."""

    def host_register(self) -> Any | None:
        """A function (address, nbytes) -> unregister that pins host memory; None if pinning is not needed."""

    def numa_node(self) -> int | None:
        """The NUMA node that the device is attached to; None: unknown, or the CPU."""

    def event_functions(self) -> dict[str, int]:
        """Arguments of `make_pool` for events (function addresses, device index); {} without events."""


class CpuDevice:
    """The CPU: no streams and no pinning; the I/O pool reads and writes tensors in place."""

    kind = "cpu"

    def timestamp(self) -> HostTimestamp:
        return HostTimestamp(time.monotonic())

    def link_bandwidth(self) -> None:
        return None

    def copy_bandwidth(self) -> float:
        return host_copy_bandwidth()

    def load_target(self, nbytes: int) -> torch.Tensor:
        return uninitialised(nbytes, torch.device("cpu"))

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def record(self, stream: Any | None) -> None:
        return None

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event | None:
        target.copy_(source)
        return None

    def copy_to_device(
        self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()
    ) -> Event | None:
        target.copy_(source)
        return None

    def load_event(self, after: Sequence[Event]) -> None:
        return None

    def new_stream(self) -> int:
        return 0

    def event_handle(self, event: Event | None) -> int:
        return 0

    def wait(self, event: Event, stream: Any | None = None) -> None:
        return None

    def block(self, event: Event, timeout: float | None = None) -> bool:
        return True

    def progress(self) -> int:
        return 0

    def current_stream(self) -> None:
        return None

    def wait_stream(self, stream: Any | None) -> None:
        return None

    def record_use(self, tensor: torch.Tensor) -> None:
        return None

    def capturing(self) -> bool:
        return False

    def host_register(self) -> None:
        return None

    def numa_node(self) -> None:
        return None

    def event_functions(self) -> dict[str, int]:
        return {}


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


def uninitialised(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of the current stream (uint8) that nothing is written to.

    `torch.empty` fills it where deterministic algorithms are on (`torch.utils.deterministic.fill_uninitialized_memory`): on the
    load stream at once, although the stream that used the memory before may still read it (`ssdtrain.offload.targets`).
    """
    storage = torch.UntypedStorage(nbytes, device=device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def device_for(device: torch.device) -> Device:
    """The device layer for `device`.

    Raises:
        ValueError: neither a CPU nor a CUDA device, or torch was built for ROCm, whose devices it calls "cuda" too.
    """
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda" and torch.version.hip is None:
        return CudaDevice(device)
    name = f"{device} (ROCm {torch.version.hip})" if device.type == "cuda" else str(device)
    raise ValueError(
        f"device {name} is not supported yet: SSDTrain offloads from CUDA devices and the CPU. Leave out the sections offload, "
        "plan and state on this machine"
    )
