"""Memory that two streams use: one that allocated it and one that saves it, two that save it, two that need it in backward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.simulation.device import Stream
from benchmarks.simulation.training import LAUNCH, Machine
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.tape import Tape

MiB = 1 << 20
SIZE = MiB // 4


class Streams:
    """The device's compute stream, a second one, an engine, and what was found wrong on the time line of the device."""

    def __init__(self) -> None:
        self.machine = Machine(400e6, [(200e6, 200e6)])
        options = EngineOptions(
            min_bytes=1024, in_flight=8 * MiB, buffer=16 * MiB, prefetch=4 * MiB, staged=True
        )
        self.engine: OffloadEngine = self.machine.engine(options)
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


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    yield made
    made.engine.close()
    made.machine.close()


def test_memory_that_another_stream_allocated_is_there_until_its_copy_has_left(streams: Streams) -> None:
    """Without the engine the graph holds it. The stream that allocated it has nothing to do, and would use it again at once."""
    held = []
    for number in range(8):
        batch = streams.make(number + 1)
        streams.side.wait(streams.compute.record())
        with streams.device.stream(streams.side):
            streams.read(batch, number + 1, 2e-3, f"forward {number}")
            held.append(streams.save(batch))
        del batch
    streams.end_of_forward()
    with streams.device.stream(streams.side):
        for number in reversed(range(8)):
            streams.read(streams.engine.unpack(held.pop()), number + 1, 1e-3, f"backward {number}")
    streams.check()
    assert streams.engine.snapshot().loaded_bytes >= 4 * SIZE


def test_memory_is_there_for_a_second_stream_that_saved_it_too(streams: Streams) -> None:
    held = [streams.save(streams.make(9)) for _ in range(4)]  # so much may be on its way at a time
    shared = streams.make(7)
    held.append(streams.save(shared))
    streams.side.wait(streams.compute.record())
    with streams.device.stream(streams.side):
        streams.read(shared, 7, 0.5, "the second stream")
        held.append(streams.save(shared))
    del shared
    assert streams.engine.snapshot().shared_tensors == 1
    for _ in range(4):
        held.append(streams.save(streams.make(9)))
        streams.machine.timeline.spend(2e-3)
    assert not streams.side.idle
    streams.check()


def test_a_view_is_copied_together_while_its_memory_is_there(streams: Streams) -> None:
    """Its operator is known to have ended when another one saves, perhaps on another stream: that is where it is copied."""
    wide = streams.device.empty(10 * SIZE)
    held = [streams.engine.pack(streams.tape, wide.view(-1, 10)[:, 3])]
    torch.ones(1, requires_grad=True).sin()
    with streams.device.stream(streams.side):
        held.append(streams.save(streams.make(1)))
    assert streams.engine.snapshot().packed_bytes == SIZE
    assert streams.device._used[wide.data_ptr()].users == [streams.side]


def test_a_second_stream_waits_for_the_decoding_on_the_first(streams: Streams) -> None:
    mask = streams.device.empty(SIZE).fill_(1).view(torch.bool)
    held = [streams.save(mask), streams.save(mask)]
    del mask
    streams.end_of_forward()
    streams.kernel(1.0)  # what comes before the decoding
    first = streams.engine.unpack(held[0])
    with streams.device.stream(streams.side):
        second = streams.engine.unpack(held[1])
        streams.kernel(1e-3)
    busy_until = streams.machine.timeline.now + 0.9
    streams.check()
    assert streams.engine.snapshot().encoded_bytes == SIZE and bool(first.all()) and bool(second.all())
    assert streams.side.log[-1].start > busy_until
