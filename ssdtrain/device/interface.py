"""What the engine asks of a device: the protocols `Event` and `Device`, and fresh memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ssdtrain.device.timestamps import Timestamp


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

    def free_bytes(self) -> int | None:
        """Bytes of device memory that no process has; None: it is the host's."""

    def load_target(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes of the device (uint8), allocated on the load stream. See `ssdtrain.offload.transfer.targets`."""

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of `source` (device, uint8) in device memory, allocated and made on the current stream."""

    def copy_to_host(self, source: int, target: int, nbytes: int) -> Event | None:
        """Queue the copy of `nbytes` from the address `source` of the device to `target` in pinned memory of the host, after the
        current stream's work. Both stay valid until the event, which is behind the copy."""

    def copy_to_device(
        self, source: int, target: int, nbytes: int, after: Sequence[Event] = (), *, within: bool = False
    ) -> Event | None:
        """Queue the copy of `nbytes` from the address `source` in pinned memory of the host, or `within` the device, to `target`
        in memory that `load_target` made, once the events have passed."""

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
        """The current stream, as it is told apart from others by `==`; None without streams. One that is false, CUDA's default
        stream, is never captured."""

    def wait_stream(self, stream: Any | None) -> None:
        """Make the current stream wait for all work queued on `stream` so far, if they differ."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor`, if another stream allocated it, is not reused before the work that is queued on the current
        stream when it is freed. Does nothing for memory that the current stream allocated."""

    def capturing(self) -> bool:
        """True while the current stream is being captured into a graph."""

    def writes_pinned(self) -> bool:
        """Whether kernels can write to the memory that `host_register` pins, at its own address."""

    def host_register(self) -> Any | None:
        """A function (address, nbytes) -> unregister that pins host memory; None if pinning is not needed."""

    def numa_node(self) -> int | None:
        """The NUMA node that the device is attached to; None: unknown, or the CPU."""

    def event_functions(self) -> dict[str, int]:
        """Arguments of `make_pool` for events (function addresses, device index); {} without events."""


def uninitialised(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of the current stream (uint8) that nothing is written to.

    `torch.empty` fills it where deterministic algorithms are on (`torch.utils.deterministic.fill_uninitialized_memory`): on the
    load stream at once, although the stream that used the memory before may still read it (`ssdtrain.offload.transfer.targets`).
    """
    storage = torch.UntypedStorage(nbytes, device=device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
