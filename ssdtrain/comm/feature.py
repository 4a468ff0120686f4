"""Compressed collectives as a feature of a runtime."""

from __future__ import annotations

import logging

import torch

from ssdtrain.comm.communicator import Communicator
from ssdtrain.comm.meter import CommMetrics
from ssdtrain.comm.policy import Policy
from ssdtrain.config import Config
from ssdtrain.device import warn_of_untested_torch
from ssdtrain.features import Feature, Placement, Step
from ssdtrain.steps import StepClock

logger = logging.getLogger("ssdtrain")

UNENDED_STEPS = 10
"""Number of optimizer steps without an end of a step of the communicator after which a warning is logged."""


class CompressedCollectives(Feature):
    """Ends the steps of a communicator and reports its traffic; an adapter sends the collectives of its framework through it.

    Args:
        comm: made on all ranks.
        clock: of the runtime.
    """

    def __init__(self, comm: Communicator, clock: StepClock) -> None:
        self.comm = comm
        self._clock = clock
        self._optimizer_steps = 0  # after the latest of which a step has ended
        self._unannounced = 0

    @classmethod
    def from_config(cls, config: Config, place: Placement, clock: StepClock) -> CompressedCollectives | None:
        """Return None where `comm` compresses nothing, or there is one rank (with a warning). A collective call."""
        if not config.compresses or config.comm is None:
            return None
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            logger.warning(
                "ssdtrain.comm does nothing: torch.distributed is not initialised when the runtime is made; call "
                "init_process_group first, or leave the comm section out (docs/collectives.md)"
            )
            return None
        if torch.distributed.get_world_size() == 1:
            logger.warning(
                "ssdtrain.comm does nothing: there is one rank, and no message to compress; start several ranks, or leave the "
                "comm section out (docs/collectives.md)"
            )
            return None
        warn_of_untested_torch()
        return cls(Communicator(Policy.from_config(config.comm), place.device), clock)

    def on_step_end(self, step: Step) -> None:
        if not step.announced:
            self._warn_unended()
        elif not step.failed:  # else the step goes on, on all ranks that have caught the exception
            self.comm.step_end(step.skipped)

    def before_reduction(self) -> None:
        """End a step where the loop announces none. Called on all ranks before each reduction of gradients, if all ranks of the
        job reduce together: see the last row of `StepClock`."""
        made = self._clock.optimizer_steps
        if not self._clock.announced and made != self._optimizer_steps:
            self._optimizer_steps = made
            self.comm.step_end()

    def _warn_unended(self) -> None:
        self._unannounced += 1
        if self._unannounced == UNENDED_STEPS and not self.comm.steps and self.comm.rank == 0:
            logger.warning(
                "comm: an optimizer made %d steps and runtime.step_end() was not called: warm-up goes on for ever, random "
                "numbers repeat, and residuals of buckets that were rebuilt stay in memory; call it after each optimizer "
                "step, on all ranks",
                UNENDED_STEPS,
            )

    def metrics(self) -> list[tuple[str, CommMetrics]]:
        return [(f"comm/{dimension}", metrics) for dimension, metrics in self.comm.metrics().items()]

    def decisions(self) -> str:
        """Return why messages went uncompressed so far, by dimension."""
        return "\n".join(
            f"comm.{dimension}: some messages go uncompressed: {', '.join(metrics.fallbacks)}"
            for dimension, metrics in self.comm.metrics().items()
            if metrics.fallbacks
        )

    def description(self) -> str:
        rules = [
            f"{name} {rule.inside if rule.inside == rule.between else f'{rule.inside}/{rule.between}'}"
            for name, rule in self.comm.policy.rules.items()
            if not rule.off
        ]
        return f"compressed collectives: {', '.join(rules) or 'none'}"
