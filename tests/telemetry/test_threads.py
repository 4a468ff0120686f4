"""What another thread does to telemetry and profiles at any bytecode: a step ends, a runtime closes, figures are read."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ssdtrain.comm import meter as meter_module
from ssdtrain.comm.meter import CommMetrics, Meter
from ssdtrain.config import load_config
from ssdtrain.offload import engine, feature, metrics
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.profile import modules, passes, time_spans
from ssdtrain.profile.time_spans import Spans
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry import journal as journal_module
from ssdtrain.telemetry import lines, trace
from ssdtrain.telemetry.journal import Journal
from ssdtrain.telemetry.totals import RuntimeMetrics, StepMetrics
from ssdtrain.telemetry.trace import StepTrace
from tests.support.bytecodes import Before, count_bytecodes


class Recorded:
    """A runtime that records a trace and proves tensors, with what it computes from one input."""

    def __init__(self, directory: Path) -> None:
        offload = {
            "directories": str(directory / "spill"),
            "amount": "all",
            "min_bytes": 1024,
            "prove_steps": 9,
        }
        report = {"path": str(directory / "out"), "trace": [1], "interval": 0}
        self.runtime = Runtime(load_config({"offload": offload, "report": report}))
        self.model = nn.Tanh()
        self.runtime.register(self.model)
        assert self.runtime.engine is not None and self.runtime.offload is not None
        self.engine, self.offload = self.runtime.engine, self.runtime.offload
        self.prover = self.engine.prover
        self.trace = next(one for one in self.runtime.features if isinstance(one, StepTrace))
        self.numbers = itertools.count(1)

    def run(self) -> torch.Tensor:
        """A gradient."""
        x = torch.linspace(-1, 1, 512).requires_grad_()
        with self.runtime.forward():
            loss = self.model(x).sum()
        with self.runtime.backward():
            loss.backward()
        assert x.grad is not None
        return x.grad

    def renew(self) -> None:
        """As in the first step again."""
        self.trace.detach()
        self.trace._ended.clear()
        self.trace._begin()
        self.engine.prover = self.prover
        self.offload._tapes = {(0, 0): weakref.ref(Tape())}

    def end_step(self) -> None:
        """What ends with a step, but for what takes the engine's lock; and a forward begins."""
        self.trace.detach()
        self.engine.prover = None
        self.offload._tapes[0, next(self.numbers)] = weakref.ref(Tape())


@pytest.mark.slow
def test_a_step_may_end_at_any_moment_of_the_forward_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature, "MOST_TAPES", 1)
    where = [engine, feature, metrics, modules, passes, trace]
    recorded = Recorded(tmp_path)
    x = torch.linspace(-1, 1, 512).requires_grad_()
    expected = torch.autograd.grad(x.tanh().sum(), x)[0]
    count = count_bytecodes(recorded.run, where)
    assert count > 1000
    for number in range(1, count):
        recorded.renew()
        with Before(number, recorded.end_step, where):
            gradient = recorded.run()
        assert torch.equal(gradient, expected), f"a step ended before bytecode {number}"
    recorded.runtime.close()
    assert not recorded.engine.meter.record and not recorded.engine.recorder.active


def test_a_recording_may_end_at_any_moment_of_what_it_records() -> None:
    offload, comm, operation = (
        OffloadMetrics(),
        CommMetrics(),
        SimpleNamespace(nbytes=1, began=1.0, seconds=1.0),
    )
    region = SimpleNamespace(name="layer")

    def count() -> None:
        offload.spans = comm.spans = Spans()
        offload.count_store_wait("store", "layer", 1.0)
        offload.count_load_wait("load", "layer", 1.0)
        offload.count_codec("layer", 1.0)
        offload.count_transfer("stores", region, operation)  # type: ignore[arg-type]
        comm.count_codec(1.0)
        comm.count_wait(1.0)

    def end() -> None:
        offload.spans = comm.spans = None

    where = [metrics, meter_module, time_spans]
    for number in range(1, count_bytecodes(count, where)):
        with Before(number, end, where):
            count()


def test_a_journal_may_close_at_any_moment_of_the_end_of_a_step(tmp_path: Path) -> None:
    figures, names = RuntimeMetrics(1, StepMetrics(1.0), []), itertools.count()

    def end_step(number: int) -> int:
        journal = Journal(tmp_path / str(next(names)), 0, 0)
        journal.add({"loss": 1.0})
        file = journal.file
        with Before(number, journal.close, [journal_module, lines]) as at:
            journal.step(1, figures)
        journal.close()
        assert file.read_text().count("\n") in (0, 1)
        return at.count

    end_step(0)
    count = end_step(0)
    assert count > 50
    for number in range(1, count):
        end_step(number)


def test_figures_of_communication_may_be_read_at_any_moment_of_a_collective() -> None:
    """Nothing is lost of what the device takes, and a first message of a dimension breaks nothing."""
    names = itertools.count()

    def read(number: int) -> int:
        meter, seconds = Meter(), 0

        def send() -> None:
            nonlocal seconds
            seconds += 1
            meter.add_device_seconds(meter.count_compressed(f"d{next(names)}", 1), lambda: 1.0)

        for _ in range(2):
            send()
        with Before(number, send, [meter_module]) as at:
            meter.snapshot()
        assert sum(found.device_seconds for found in meter.snapshot().values()) == seconds
        return at.count

    read(0)
    count = read(0)
    assert count > 50
    for number in range(1, count):
        read(number)
