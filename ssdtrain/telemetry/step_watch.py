"""A warning where a loop does not say that a step is over: until it does, nothing is recorded."""

from __future__ import annotations

import logging

from ssdtrain.features import Feature, Forward, Step

__all__ = ["StepWatch"]

logger = logging.getLogger("ssdtrain")

MOST = 512
"""Forwards in a step: those of all microbatches and model chunks."""


class StepWatch(Feature):
    """Warns once: after `MOST` forwards, or at close where there were fewer, if no step has ended."""

    def __init__(self) -> None:
        self._forwards = 0
        self._quiet = False

    def on_forward(self, forward: Forward) -> None:
        self._forwards += 1
        if self._forwards == MOST:
            self._warn()

    def on_step_end(self, step: Step) -> None:
        self._quiet = True

    def _warn(self) -> None:
        if self._quiet:
            return
        self._quiet = True
        logger.warning(
            "report: nothing is recorded until a step ends, and none has (forwards so far: %d): call runtime.step_end() after "
            "the optimizer's step, or run each step inside of runtime.step()",
            self._forwards,
        )

    def close(self) -> None:
        if self._forwards:
            self._warn()
