"""Predictions of plans beside what was measured, as figures of `benchmarks.planner`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ssdtrain.config.units import MiB


class Took(NamedTuple):
    """What a forward and a backward took, seconds."""

    clock: float
    thread: float
    """CPU seconds of the thread that trains, and those in which it waited for stores and loads."""


@dataclass
class Errors:
    """Of the predictions of some plans, as parts of what was measured."""

    peak: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    """Of measured peaks: the difference of the largest from the smallest."""
    seconds: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    """Of the measured times: see `noise`."""
    thread: list[float] = field(default_factory=list)
    thread_noise: list[float] = field(default_factory=list)
    """Of `Took.thread`."""

    def add(self, other: Errors) -> None:
        """Those of other plans."""
        for name, values in vars(other).items():
            getattr(self, name).extend(values)

    def compare(
        self, peak: int, peaks: Sequence[int], ratio: float, took: Sequence[Took], kept: Sequence[Took]
    ) -> str:
        """Add a plan, and describe it.

        Args:
            peak: predicted, bytes; `peaks`: of some steps, measured.
            ratio: of the time of a step to that of one that keeps everything, predicted.
            took, kept: the same, measured in the same rounds.
        """
        by_clock = ratios([one.clock for one in took], [one.clock for one in kept])
        by_thread = ratios([one.thread for one in took], [one.thread for one in kept])
        clock, thread = statistics.median(by_clock), statistics.median(by_thread)
        of_steps = statistics.median(peaks)
        self.peak.append(abs(peak / of_steps - 1))
        self.spread.append((max(peaks) - min(peaks)) / of_steps)
        self.seconds.append(abs(ratio / clock - 1))
        self.noise.append(noise(by_clock))
        self.thread.append(abs(ratio / thread - 1))
        self.thread_noise.append(noise(by_thread))
        return (
            f"peak {peak / MiB:.1f} predicted, {of_steps / MiB:.1f} MiB measured (spread {self.spread[-1]:.1%}); "
            f"time x{ratio:.3f} predicted, x{clock:.3f} measured (noise {self.noise[-1]:.1%}), "
            f"x{thread:.3f} of the thread (noise {self.thread_noise[-1]:.1%})"
        )

    def figures(self) -> dict[str, float]:
        """The largest of each, and medians of what was predicted."""
        return {
            "peak_error": max(self.peak),
            "peak_error_median": statistics.median(self.peak),
            "peak_spread": max(self.spread),
            "step_time_error": max(self.seconds),
            "step_time_error_median": statistics.median(self.seconds),
            "step_time_noise": max(self.noise),
            "thread_time_error": max(self.thread),
            "thread_time_error_median": statistics.median(self.thread),
            "thread_time_noise": max(self.thread_noise),
        }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def noise(values: Sequence[float]) -> float:
    """The difference between the medians of even and of odd rounds, relative."""
    return abs(statistics.median(values[::2]) / statistics.median(values[1::2]) - 1)
