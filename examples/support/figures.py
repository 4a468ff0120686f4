"""What a step used and waited for: by the independent meter, or by SSDTrain's own statistics.

Both count the same: the storages of saved tensors that are alive, each once, without parameters and buffers. SSDTrain adds the
buffers that it holds for transfers.
"""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from examples.support.activation_meter import SavedTensorMeter, StepRecord
from ssdtrain.runtime import Runtime, RuntimeMetrics


class Figures(ABC):
    """Collects the steps that count; `fields` are those of `RunResult`."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, StepRecord]] = []

    @abstractmethod
    def step(self) -> AbstractContextManager[StepRecord]:
        """Around the forward and backward of one step."""

    def take(self, record: StepRecord, seconds: float) -> None:
        """The step of `record` counts; it took `seconds`, the optimizer included."""
        self._steps.append((seconds, record))

    def fields(self) -> dict[str, Any]:
        times = [seconds for seconds, _ in self._steps]
        middle = statistics.median_low(times)
        shown = next(record for seconds, record in self._steps if seconds == middle)
        return {
            "step_seconds": times,
            "activation_peak_bytes": max(record.peak_bytes for _, record in self._steps),
            "activation_timeline": shown.timeline,
            "backward_began": shown.marks.get("backward"),
        }


class MeterFigures(Figures):
    """Without SSDTrain."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._meter = SavedTensorMeter(module)

    def step(self) -> AbstractContextManager[StepRecord]:
        return self._meter.step()


class RuntimeFigures(Figures):
    """With SSDTrain: its hooks are the innermost, so that any others would see nothing."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        assert runtime.engine is not None
        self._runtime = runtime
        self._meter = runtime.engine.meter
        self._meter.start_timeline()
        self._before = self._after = self._statistics()

    def _statistics(self) -> RuntimeMetrics:
        found = self._runtime.statistics()
        assert found is not None
        return found

    @contextmanager
    def step(self) -> Iterator[StepRecord]:
        if not self._steps:
            self._before = self._statistics()
        self._runtime.reset_peak()
        record = StepRecord()
        yield record
        self._after = self._statistics()
        record.timeline = [(max(0.0, at - record.began), alive) for at, alive in self._meter.timeline]

    def fields(self) -> dict[str, Any]:
        before, after = self._before, self._after
        return {
            **super().fields(),
            "bytes_written": after.store.ssd_bytes_written - before.store.ssd_bytes_written,
            "bytes_read": after.store.ssd_bytes_read - before.store.ssd_bytes_read,
            "bytes_cancelled": after.offload.avoided_write_bytes - before.offload.avoided_write_bytes,
            "stall_seconds": after.offload.stall_seconds - before.offload.stall_seconds,
        }


def figures_of(module: nn.Module, runtime: Runtime | None) -> Figures:
    """The figures of steps of a model, SSDTrain's own where a runtime is attached to it."""
    return MeterFigures(module) if runtime is None else RuntimeFigures(runtime)
