"""The CPU as a device: no streams, no pinning."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

from ssdtrain.device.bandwidth import host_copy_bandwidth
from ssdtrain.device.interface import Event, uninitialised
from ssdtrain.device.timestamps import HostTimestamp


class CpuDevice:
    """The CPU: no streams and no pinning; the I/O pool reads and writes tensors in place."""

    kind = "cpu"

    def timestamp(self) -> HostTimestamp:
        return HostTimestamp(time.monotonic())

    def link_bandwidth(self) -> None:
        return None

    def copy_bandwidth(self) -> float:
        return host_copy_bandwidth()

    def free_bytes(self) -> None:
        return None

    def load_target(self, nbytes: int) -> torch.Tensor:
        return uninitialised(nbytes, torch.device("cpu"))

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def record(self, stream: Any | None) -> None:
        return None

    def copy_to_host(self, source: int, target: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_to_device(
        self, source: int, target: int, nbytes: int, after: Sequence[Event] = (), *, within: bool = False
    ) -> None:
        ctypes.memmove(target, source, nbytes)

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

    def writes_pinned(self) -> bool:
        return False

    def host_register(self) -> None:
        return None

    def numa_node(self) -> None:
        return None

    def event_functions(self) -> dict[str, int]:
        return {}
