"""A device with two streams and an engine, for tests of memory that both use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.tensors.tape import Tape
from tests.support.simulated.device import Stream
from tests.support.simulated.training import LAUNCH, Machine

MiB = 1 << 20
SIZE = MiB // 4


class Streams:
    """The device's compute stream, a second one, an engine, and what was found wrong on the time line of the device.

    Args:
        host_bytes: of a pinned host tier in front of the drive; 0: none.
    """

    def __init__(self, host_bytes: int = 0) -> None:
        self.machine = Machine(400e6, [(200e6, 200e6)])
        options = EngineOptions(
            min_bytes=1024, in_flight=8 * MiB, buffer=16 * MiB, prefetch=4 * MiB, staged=True
        )
        self.engine: OffloadEngine = self.machine.engine(options, host_bytes=host_bytes)
        self.device = self.machine.device
        self.compute = self.device.compute
        self.side = Stream(self.device, "side")
        self.device.streams.append(self.side)
        self.tape = Tape(0, 0)
        self.wrong: list[str] = []

    def make(self, value: int) -> torch.Tensor:
        """Memory of the current stream, which a kernel fills."""
        tensor = self.device.empty(SIZE)
        address = tensor.data_ptr()
        self.kernel(1e-4, lambda: ctypes.memset(address, value, SIZE))
        return tensor

    def kernel(self, seconds: float, end: Callable[[], Any] | None = None, **more: Any) -> None:
        self.machine.timeline.spend(LAUNCH)
        self.device.current_stream().work(seconds, end=end, **more)

    def read(self, tensor: torch.Tensor, value: int, seconds: float, what: str) -> None:
        """A kernel that looks at the bytes when it begins and when it ends."""
        address = tensor.data_ptr()

        def look() -> None:
            if ctypes.string_at(address, SIZE) != bytes([value]) * SIZE:
                self.wrong.append(what)

        self.kernel(seconds, begin=look, end=look)

    def save(self, tensor: torch.Tensor) -> Any:
        """The tensor is saved, and the operator that saved it has ended."""
        held = self.engine.pack(self.tape, tensor)
        torch.ones(1, requires_grad=True).sin()
        return held

    def end_of_forward(self) -> None:
        self.engine.finish_forward(self.tape)
        self.device.synchronize()
        self.engine.prefetch(self.tape)

    def check(self) -> None:
        self.device.synchronize()
        assert not self.wrong and not self.device.violations
