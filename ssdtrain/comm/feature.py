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

__all__ = ["CompressedCollectives"]

logger = logging.getLogger("ssdtrain")


class CompressedCollectives(Feature):
    """Ends the steps of a communicator and reports its traffic; an adapter sends the collectives of its framework through it.

    Args:
        comm: made on all ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @classmethod
    def from_config(cls, config: Config, place: Placement) -> CompressedCollectives | None:
        """Return None where `comm` compresses nothing, or there is one rank (with a warning). A collective call."""
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

    def on_step_end(self, step: Step) -> None:
        if not step.failed:  # else the step goes on, on all ranks that have caught the exception
            self.comm.step_end(step.skipped)

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
