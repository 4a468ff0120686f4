"""Log messages about the job: written once, by rank 0, with the ranks that they come from."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.cuda_runtime import made_current

logger = logging.getLogger("ssdtrain")

# Steps at whose end ranks exchange messages: the first ones, then one in `INTERVAL`.
FIRST_STEPS = 3
INTERVAL = 50


class Notices:
    """Warnings of all ranks, one for each subject.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: dict[str, str] = {}
        self._written: set[str] = set()

    def add(self, subject: str, text: str) -> None:
        """Write `text` at the next exchange.

        Args:
            subject: what it is about: of several texts about one, from one rank or many, the first is written.
        """
        if subject not in self._written:
            self._waiting.setdefault(subject, text)

    def step_end(self, step: int, warmup_steps: int) -> None:
        """Exchange pending messages, if that is due. A collective call of the job."""
        if step <= FIRST_STEPS or step == warmup_steps + 1 or step % INTERVAL == 0:
            self.exchange()

    def exchange(self) -> None:
        """Write the pending messages of all ranks. A collective call of the job."""
        found: list[Any] = [None] * dist.get_world_size()
        with made_current(self._device):
            dist.all_gather_object(found, self._waiting)
        self._written |= {subject for one in found for subject in one}
        self._waiting = {}
        if dist.get_rank() != 0:
            return
        texts: dict[str, tuple[str, list[int]]] = {}
        for rank, one in enumerate(found):
            for subject, text in one.items():
                texts.setdefault(subject, (text, []))[1].append(rank)
        for text, ranks in texts.values():
            logger.warning("%s [%s]", text, _named(ranks, len(found)))


def _named(ranks: list[int], count: int) -> str:
    if len(ranks) == count:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
