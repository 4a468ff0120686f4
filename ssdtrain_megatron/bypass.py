"""Notices a training loop that runs the model without megatron-core's schedules: nothing would be offloaded or recomputed."""

from __future__ import annotations

import logging
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ssdtrain.features import Feature, Forward
from ssdtrain.profile.modules import no_hook

__all__ = ["BypassedSchedules"]

logger = logging.getLogger("ssdtrain")

MOST = 10
"""Forwards outside of a schedule, before any inside of one, that are taken for a loop's own beginning."""


class BypassedSchedules(Feature):
    """Warns once where a chunk's forwards with gradients do not come from a schedule, until the first one that does.

    An adapter appends it to `Runtime.features`.
    """

    def __init__(self) -> None:
        self._forwards = 0
        self._handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module) -> None:
        self._handles.append(model.register_forward_pre_hook(_Before(self)))

    def forward(self) -> None:
        """A chunk's forward begins."""
        if not torch.is_grad_enabled():
            return
        self._forwards += 1
        if self._forwards == MOST:
            self.detach()
            logger.warning(
                "the model ran %d forwards with gradients, none of them by forward_step of "
                "megatron.core.pipeline_parallel.schedules: nothing of them is offloaded or recomputed. A loop that calls the "
                "model by itself uses ssdtrain.attach; a schedule of your own looks forward_step and backward_step up in that "
                "module when it calls them",
                MOST,
            )

    def on_forward(self, forward: Forward) -> AbstractContextManager[Any] | None:
        self.detach()
        return None

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Before:
    """Copied or pickled as a hook without effect."""

    def __init__(self, schedules: BypassedSchedules) -> None:
        self._schedules = weakref.ref(schedules)

    def __call__(self, *_: Any) -> None:
        schedules = self._schedules()
        if schedules is not None:
            schedules.forward()

    def __reduce__(self) -> Any:
        return no_hook()
