"""While a CUDA graph is being captured nothing may be asked of events or other streams: the capture would be invalid."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.simulation.device import SimulatedEvent
from benchmarks.simulation.training import Machine
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.region import Kept
from ssdtrain.offload.tape import Tape

MiB = 1 << 20


def test_saving_during_a_capture_asks_no_event_and_keeps_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(400e6, [(200e6, 200e6)])
    engine = machine.engine(
        EngineOptions(min_bytes=1024, in_flight=4 * MiB, buffer=8 * MiB, prefetch=4 * MiB, staged=True)
    )
    capturing = False
    query = SimulatedEvent.query

    def asked(event: SimulatedEvent) -> bool:
        assert not capturing, "an event was asked during the capture"
        return query(event)

    monkeypatch.setattr(SimulatedEvent, "query", asked)
    try:
        tape = Tape(0, 0)
        before = [engine.pack(tape, machine.device.empty(MiB // 4)) for _ in range(4)]
        engine.finish_forward(tape)
        saved = engine.snapshot().saved_tensors
        capturing = True
        with machine.device.capture():
            del before[0]
            gc.collect()
            held = engine.pack(tape, machine.device.empty(MiB // 4))
        capturing = False
        assert isinstance(held, Kept) and isinstance(held.unchanged(), torch.Tensor)
        assert engine.snapshot().saved_tensors == saved + 1, "it is counted"
    finally:
        engine.close()
        machine.close()
