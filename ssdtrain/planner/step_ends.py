"""When a step of training is over, also for a loop that does not say so.

Note: [A loop that announces no steps]
A plain loop may never say that a step is over. Then steps end before an optimizer runs, by torch's global hook: from the second
optimizer step on, so that the first one of a loop which does say so is not taken for an end, and only where a forward came in
between, so that several optimizers are one step.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["StepEnds"]


class StepEnds:
    """Calls a method at the end of each step.

    Args:
        end: a bound method, which is called with the seconds of the step; its object is not kept alive.
        before: called before it where the loop does not announce its steps.
    """

    def __init__(self, end: Callable[[float], None], before: Callable[[], object]) -> None:
        self._end, self._before = weakref.WeakMethod(end), before
        self._forwards = 0  # since the last end
        self._announced = self._optimizer_ran = False
        self._ended_at = time.perf_counter()
        self._hook = register_optimizer_step_pre_hook(_Hook(self))  # torch's table outlives everything
        weakref.finalize(self, self._hook.remove)

    def forward(self) -> None:
        """A forward with gradients begins."""
        self._forwards += 1

    def announced(self, seconds: float) -> None:
        """The loop says that a step of so many seconds is over."""
        self._announced = True
        self._call(seconds)

    def optimizer_runs(self) -> None:
        """See Note: [A loop that announces no steps]."""
        if self._announced or not self._forwards:
            return
        now = time.perf_counter()
        if self._optimizer_ran:
            self._before()
            self._call(now - self._ended_at)
        self._optimizer_ran, self._forwards, self._ended_at = True, 0, now

    def _call(self, seconds: float) -> None:
        end = self._end()
        if end is not None:
            end(seconds)

    def close(self) -> None:
        self._hook.remove()


class _Hook:
    """Tells a `StepEnds` that is still there."""

    def __init__(self, ends: StepEnds) -> None:
        self._ends = weakref.ref(ends)

    def __call__(self, *_: object) -> None:
        ends = self._ends()
        if ends is not None:
            ends.optimizer_runs()
