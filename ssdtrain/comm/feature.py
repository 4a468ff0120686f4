"""Compressed collectives as a feature of a runtime."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ssdtrain.comm.communicator import Communicator
from ssdtrain.comm.meter import CommMetrics
from ssdtrain.comm.policy import Policy
from ssdtrain.config import Config
from ssdtrain.device import warn_of_untested_torch
from ssdtrain.features import Feature, Placement, Step

__all__ = ["CompressedCollectives"]

logger = logging.getLogger("ssdtrain")

_UNANNOUNCED = 10
"""Steps of an optimizer without the end of a step after which a warning is logged."""


class CompressedCollectives(Feature):
    """Ends the steps of a communicator and reports its traffic; an adapter sends the collectives of its framework through it.

    Args:
        comm: made on all ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._unannounced = 0
        self._watching: RemovableHandle | None = None

    @classmethod
    def from_config(cls, config: Config, place: Placement) -> CompressedCollectives | None:
        """None where `comm` compresses nothing, or there is one rank (with a warning). A collective call."""
        if not config.compresses or config.comm is None:
            return None
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            logger.warning("comm does nothing: torch.distributed is not initialised when the runtime is made")
            return None
        if torch.distributed.get_world_size() == 1:
            logger.warning(
                "ssdtrain.comm does nothing: there is one rank, and no message to compress; start several ranks, or leave the "
                "comm section out"
            )
            return None
        warn_of_untested_torch()
        return cls(Communicator(Policy.from_config(config.comm), place.device))

    def attach(self, model: nn.Module) -> None:
        if self._watching is None:
            method = weakref.WeakMethod(self._stepped)  # the table of these hooks is global
            self._watching = register_optimizer_step_post_hook(
                lambda *args: found(*args) if (found := method()) is not None else None
            )
            weakref.finalize(self, self._watching.remove)

    def detach(self) -> None:
        if self._watching is not None:
            self._watching.remove()
            self._watching = None

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count the steps of the optimizer that steps first: of a loop that never ends a step, training goes on, but wrongly."""
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._unannounced += 1
            if self._unannounced == _UNANNOUNCED and self.comm.rank == 0:
                logger.warning(
                    "comm: an optimizer made %d steps and runtime.step_end() was not called: warm-up goes on for ever, random "
                    "numbers repeat, and residuals of buckets that were rebuilt stay in memory; call it after each optimizer "
                    "step, on all ranks",
                    _UNANNOUNCED,
                )

    def on_step_end(self, step: Step) -> None:
        self.detach()
        self.comm.step_end(step.skipped)

    def metrics(self) -> list[tuple[str, CommMetrics]]:
        return [(f"comm/{dimension}", found) for dimension, found in self.comm.metrics().items()]

    def description(self) -> str:
        rules = [
            f"{name} {rule.inside if rule.inside == rule.between else f'{rule.inside}/{rule.between}'}"
            for name, rule in self.comm.policy.rules.items()
            if not rule.off
        ]
        return f"compressed collectives: {', '.join(rules) or 'none'}"
