"""Compressed inputs of linear layers as a feature of the runtime.

Note: [Which step]
    Projections change with the optimizer step. An integration sets `step` to the framework's own counter. In a plain loop
    `Runtime.step_end` counts; without it, the steps of the torch optimizer that holds a compressed weight are counted. With
    "lowrank" only the optimizer counts, because a projection must not change between a backward and the step that uses its
    gradients.

    Only one optimizer is counted: the first one that holds a compressed weight. It is replaced by another one when it no longer
    exists, or when the other makes two steps in a row without it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ssdtrain.compact.layers import CompactLayer, Compression, find_layers
from ssdtrain.compact.linear import CompactForward, ReplacedForward
from ssdtrain.compact.lowrank import LowRank, skips_step
from ssdtrain.config import CompactConfig, ConfigError, ConfigIssue
from ssdtrain.device.runtime import made_current
from ssdtrain.features import FIRST_STEPS, Feature, Forward, Placement, Step
from ssdtrain.metrics import MetricSet
from ssdtrain.optimizer_hooks import StepHook, call_after_steps

__all__ = ["CompactLinear"]

logger = logging.getLogger("ssdtrain")

_FORWARDS = 2048
"""Forwards without an optimizer step after which a warning is logged."""


class CompactLinear(Feature):
    """Replaces the forwards of linear layers of the attached models until `detach`.

    Attributes:
        compression: state shared by the layers.
        steps: optimizer steps so far, part of a projection's key; set it after a resume.
        step: returns the step; an adapter replaces it by the framework's own counter. See Note: [Which step].
        rename: see `find_layers`; set before `attach`.
        optimizer: of the model; with "lowrank" set before `attach`.
        elsewhere: other model chunks or pipeline stages have the layers, so that a model without any is not an error: see
            `look_elsewhere`.
    """

    def __init__(self, config: CompactConfig, placement: Placement) -> None:
        self.config = config
        self._device = placement.device
        self.compression = Compression(config, placement.rank)
        self._steps = 0
        self.step: Callable[[], int] = lambda: self.steps
        self.compression.step = lambda: self.step()
        self.rename: Callable[[str, nn.Module], str] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.elsewhere = False
        self._forwards: list[CompactForward] = []
        self._inside: set[nn.Module] | None = None
        self._low_rank: list[LowRank] = []
        self._finished = 0
        self._counting: StepHook | None = None
        self._counted_for: weakref.ref[torch.optim.Optimizer] | None = None
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Other optimizers of compressed weights that made a step since the counted one did."""
        self._optimizer_steps = 0  # counted in `steps`
        self._forwards_of_step = 0

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value
        for low_rank in self._low_rank:
            low_rank.resume()

    def look_elsewhere(self, chunks: Sequence[nn.Module]) -> None:
        """Learn whether only some chunks of a pipeline, on any rank, have the layers; before `attach`, and a collective call."""
        mine = [bool(find_layers(chunk, self.config, self.rename, required=False)) for chunk in chunks]
        everywhere: list[Any] = [any(mine)]
        if torch.distributed.is_initialized():
            everywhere *= torch.distributed.get_world_size()
            with made_current(self._device):
                torch.distributed.all_gather_object(everywhere, any(mine))
        self.elsewhere = any(everywhere) and not all(mine)

    def attach(self, model: nn.Module) -> None:
        """Raises ConfigError: no layer is found, one is compressed already, or the mode cannot be had."""
        layers = find_layers(model, self.config, self.rename, required=not self.elsewhere)
        for layer in layers:
            if isinstance(layer.module.__dict__.get("forward"), ReplacedForward):
                why = f"meets the layer {layer.name}, which another runtime compresses already"
                allowed = "closing that one first"
                raise ConfigError([ConfigIssue("ssdtrain.compact", self.config.mode, why, allowed)])
        if self.config.mode == "lowrank":
            self._low_rank.append(LowRank(model, layers, self.compression, self.optimizer))
        else:
            for layer in layers:
                compact = CompactLayer(layer, self.compression)
                self._forwards.append(CompactForward(layer.module, layer.kind, compact))
            self._activate()
        if self._counting is None:
            self._counting = call_after_steps(_without_owner(self._stepped))
            weakref.finalize(self, self._counting.remove)

    def compress_in(self, modules: Iterable[nn.Module] | None) -> None:
        """Compress inputs only in layers inside of these modules, from the next forward on; None: in all. Not with "lowrank",
        which has other weights."""
        self._inside = (
            None if modules is None else {layer for module in modules for layer in module.modules()}
        )
        self._activate()

    def _activate(self) -> None:
        for forward in self._forwards:
            forward.active = self._inside is None or forward.module in self._inside

    def merge(self) -> None:
        """Add the trained low-rank matrices to the weights.

        A save does not merge, because a single rank may save. If every rank calls this before a save, a resumed run continues
        bit for bit; otherwise up to rounding.
        """
        for low_rank in self._low_rank:
            low_rank.merge()

    def detach(self) -> None:
        if self._counting is not None:
            self._counting.remove()
            self._counting = None
        while self._forwards:
            self._forwards.pop().remove()
        while self._low_rank:
            self._low_rank.pop().restore()
        self.compression.forget()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step of the optimizer; every torch optimizer of this process calls it."""
        if (self._finished and not self._low_rank) or skips_step(optimizer):
            return
        counted = self._counted_for() if self._counted_for is not None else None
        if counted is not optimizer:
            if not self._trains(optimizer):
                return
            for low_rank in self._low_rank:
                low_rank.check_optimizer(optimizer)
            if counted is not None and optimizer not in self._others:
                self._others.add(optimizer)
                return
            self._counted_for = weakref.ref(optimizer)
        self._others.clear()
        self._optimizer_steps += 1
        self._next_step(1)

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        factors = (layer.factor for low_rank in self._low_rank for layer in low_rank.layers)
        weights = (forward.module.weight for forward in self._forwards)
        return any(id(parameter) in held for parameter in (*factors, *weights))

    def _next_step(self, count: int) -> None:
        self._steps += count
        self._forwards_of_step = 0
        for low_rank in self._low_rank:
            low_rank.advance()

    def on_forward(self, forward: Forward) -> AbstractContextManager[None]:
        self._forwards_of_step += 1
        if self._forwards_of_step == _FORWARDS and not self.step() and self.compression.codec is None:
            logger.warning(
                "compact: %d forwards without an optimizer step; all of them use the same projection. "
                "Call runtime.step_end() after each optimizer step",
                _FORWARDS,
            )
        return self._forget_after()

    @contextmanager
    def _forget_after(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.compression.forget()

    def on_step_end(self, step: Step) -> None:
        self._finished += 1
        if not self._low_rank:
            # Several optimizer steps may precede the first `step_end`; they have been counted already.
            self._next_step(max(0, 1 - self._optimizer_steps))
            self._optimizer_steps = 0
        self.compression.forget()
        counted = self.compression.counted
        idle = not counted.input_bytes and self._inside is None and not self.elsewhere
        if self._finished == FIRST_STEPS and idle:
            logger.warning(
                "compact is enabled and compressed nothing in the first %d steps: %s",
                FIRST_STEPS,
                f"{counted.skipped_inputs} inputs are saved by what made them anyway"
                if counted.skipped_inputs
                else "no forward with gradients reached its layers, or their weights are frozen",
            )

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return (("compact", self.compression.counted),)

    def description(self) -> str:
        config = self.config
        what = config.codec if config.mode == "quant" else config.projection
        return f"linear layers keep compressed inputs: {config.mode} ({what})"

    def close(self) -> None:
        self.detach()


def _without_owner(method: Callable[..., None]) -> Callable[..., None]:
    """`method` through a weak reference, for a global table that would otherwise keep the owner and its models alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        present = reference()
        if present is not None:
            present(*args)

    return call
