"""While a CUDA graph is being captured nothing may be asked of events or other streams: the simulated device refuses it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.tensors.region import Kept
from ssdtrain.offload.tensors.tape import Tape
from tests.simulation.conftest import until_closed
from tests.support.simulated.training import Machine

MiB = 1 << 20


class Captures:
    """A machine, an engine, and a forward of which copies are under way."""

    def __init__(self) -> None:
        self.machine = Machine(400e6, [(200e6, 200e6)])
        self.device = self.machine.device
        self.engine: OffloadEngine = self.machine.engine(
            EngineOptions(min_bytes=1024, in_flight=4 * MiB, buffer=8 * MiB, prefetch=4 * MiB, staged=True)
        )
        self.tape = Tape(0, 0)
        self.held: list[Any] = []
        for _ in range(4):
            self.save()
        assert self.engine.snapshot().in_flight_bytes, "nothing is under way"

    def save(self) -> None:
        """A tensor is saved, and the operator that saved it has ended."""
        self.held.append(self.engine.pack(self.tape, self.device.empty(MiB // 4)))
        torch.ones(1, requires_grad=True).sin()


@pytest.fixture
def captures() -> Iterator[Captures]:
    yield from until_closed(Captures())


def test_the_device_refuses_what_cuda_refuses(captures: Captures) -> None:
    event = captures.device.record(captures.device.compute)
    with captures.device.capture():
        for asked in (event.query, event.synchronize, lambda: captures.device.wait(event)):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                asked()


def test_saving_during_a_capture_keeps_the_tensor(captures: Captures) -> None:
    engine = captures.engine
    engine.finish_forward(captures.tape)
    saved = engine.snapshot().saved_tensors
    with captures.device.capture():
        del captures.held[0]
        gc.collect()
        held = engine.pack(captures.tape, captures.device.empty(MiB // 4))
    assert isinstance(held, Kept) and isinstance(held.unchanged(), torch.Tensor)
    assert engine.snapshot().saved_tensors == saved + 1, "it is counted"


def test_a_forward_and_a_backward_inside_of_a_capture_leave_it_alone(captures: Captures) -> None:
    """What else an adapter calls: saved tensors of an earlier forward may have died, and copies of it may be under way."""
    engine = captures.engine
    tape = Tape(0, 1)
    with captures.device.capture():
        engine.begin_forward(tape)
        del captures.held[0]
        gc.collect()
        engine.finish_forward(tape)
        engine.next_backward([captures.tape])
        engine.prefetch(tape)
        engine.drain()
        engine.grow(between_steps=True)
        engine.snapshot()
    engine.drain()
    assert engine.metrics.live_regions == 3, "what died meanwhile is released afterwards"


def test_what_a_forward_outside_saved_cannot_be_captured(captures: Captures) -> None:
    """A graph would read its memory at each replay."""
    engine = captures.engine
    engine.finish_forward(captures.tape)
    with captures.device.capture(), pytest.raises(RuntimeError, match="Capture the forward too"):
        engine.unpack(captures.held[-1])
    assert isinstance(engine.unpack(captures.held[-1]), torch.Tensor)
