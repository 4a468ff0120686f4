"""Figures of offloading where a DeepSpeed user looks for figures: its monitor and its log."""

from __future__ import annotations

from typing import Any

from ssdtrain.runtime import Runtime, RuntimeMetrics
from ssdtrain_ds import _compat

__all__ = ["Monitor"]

PREFIX = "Train/SSDTrain"

GB = 1e9


class Monitor:
    """Writes this rank's figures after each step.

    To DeepSpeed's monitor (TensorBoard, csv, Weights & Biases, Comet) with every step, against the samples seen, as its other
    figures are; to the log every `steps_per_print` steps, or every `report.interval` where DeepSpeed's config does not say, and
    never if that is 0. Both on rank 0 only, which is what DeepSpeed does. With `wall_clock_breakdown` the log also says what
    training waited for.
    """

    def __init__(self, engine: Any, runtime: Runtime) -> None:
        self._engine = engine
        self._runtime = runtime
        self._before: RuntimeMetrics | None = runtime.statistics()

    def step(self) -> None:
        """A step is over."""
        engine = self._engine
        if engine.global_rank != 0:
            return
        interval = self._runtime.config.report.interval
        every = engine.steps_per_print()
        if every is None:  # DeepSpeed's default
            every = interval
        logs = bool(interval) and bool(every) and engine.global_steps % every == 0
        if not (engine.monitor.enabled or logs):
            return
        now = self._runtime.statistics()
        before, self._before = self._before, now
        if now is None or before is None:
            return
        if engine.monitor.enabled:
            engine.monitor.write_events(
                [
                    (f"{PREFIX}/{name}", value, engine.global_samples)
                    for name, value in self._events(before, now).items()
                ]
            )
        if logs:
            _compat.log_on_rank_0(self._line(now))

    def _events(self, before: RuntimeMetrics, now: RuntimeMetrics) -> dict[str, float]:
        """Since the step before, except for the peak, which is since the start: bytes and seconds."""
        found: dict[str, float] = {}
        for dimension, figures in now.comm.items():
            last = before.comm.get(dimension)
            for name in ("raw_bytes", "wire_bytes"):
                found[f"comm/{dimension}_{name}"] = getattr(figures, name) - (
                    getattr(last, name) if last else 0
                )
        if self._runtime.engine is None:
            return found
        old, new = before.offload, now.offload
        return found | {
            "offloaded_bytes": new.offloaded_bytes - old.offloaded_bytes,
            "kept_bytes": new.kept_bytes - old.kept_bytes,
            "loaded_bytes": new.loaded_bytes - old.loaded_bytes,
            "cancelled_bytes": new.cancelled_bytes - old.cancelled_bytes,
            "forwarded_bytes": new.forwarded_bytes - old.forwarded_bytes,
            "ssd_bytes_written": now.store.ssd_bytes_written - before.store.ssd_bytes_written,
            "activation_peak_bytes": new.activation_peak_bytes,
            "store_wait_seconds": new.store_wait_seconds - old.store_wait_seconds,
            "load_wait_seconds": new.load_wait_seconds - old.load_wait_seconds,
        }

    def _line(self, now: RuntimeMetrics) -> str:
        line = f"[ssdtrain] step={self._engine.global_steps}"
        if self._runtime.engine is not None:
            line += self._offloaded(now)
        for dimension, figures in now.comm.items():
            line += f", {dimension} sent {figures.wire_bytes / GB:.3f} of {figures.raw_bytes / GB:.3f} GB"
        return line

    def _offloaded(self, now: RuntimeMetrics) -> str:
        found = now.offload
        line = (
            f", offloaded {found.offloaded_bytes / GB:.3f} GB, "
            f"kept {found.kept_bytes / GB:.3f} GB, written to SSD {now.store.ssd_bytes_written / GB:.3f} GB "
            f"({found.cancelled_bytes / GB:.3f} GB avoided), activation peak {found.activation_peak_bytes / GB:.3f} GB"
        )
        if self._engine.wall_clock_breakdown():
            line += (
                f", time (ms) waited for stores: {found.store_wait_seconds * 1e3:.2f} | for loads: "
                f"{found.load_wait_seconds * 1e3:.2f} | in {now.steps} steps: {now.step_seconds * 1e3:.2f}"
            )
        return line
