"""Compressed inputs of linear layers as a feature of the runtime.

Note: [Which step]
    Projections change with the optimizer step, as `ssdtrain.steps.StepClock` counts them; an integration sets `step` to the
    framework's own counter. With "lowrank" only the steps of its optimizer count, because a projection must not change between a
    backward and the step that uses its gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ssdtrain.compact.layers import CompactLayer, Compression, find_layers
from ssdtrain.compact.linear import CompactForward, ReplacedForward
from ssdtrain.compact.lowrank import LowRank
from ssdtrain.config import CompactConfig, ConfigError
from ssdtrain.device.runtime import made_current
from ssdtrain.features import FIRST_STEPS, Feature, Forward, Placement, Step
from ssdtrain.metrics import MetricSet

logger = logging.getLogger("ssdtrain")


class CompactLinear(Feature):
    """Replaces the forwards of linear layers of the attached models until `detach`.

    Args:
        config: the section of the config.
        placement: of this rank.
        counted: the optimizer steps of this process, as a clock counts them.

    Attributes:
        compression: state shared by the layers.
        steps: optimizer steps so far, part of a projection's key; set it after a resume.
        step: returns the step; an adapter replaces it by the framework's own counter. See Note: [Which step].
        rename: see `find_layers`; set before `attach`.
        optimizer: of the model; with "lowrank" set before `attach`.
        elsewhere: other model chunks or pipeline stages have the layers, so that a model without any is not an error: see
            `look_elsewhere`.
    """

    def __init__(
        self, config: CompactConfig, placement: Placement, counted: Callable[[], int] = lambda: 0
    ) -> None:
        self.config = config
        self._device = placement.device
        self.compression = Compression(config, placement.rank)
        self._counted, self._resumed = counted, 0
        self.step: Callable[[], int] = lambda: self.steps
        self.compression.step = lambda: self.step()
        self.rename: Callable[[str, nn.Module], str] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.elsewhere = False
        self._forwards: list[CompactForward] = []
        self._inside: set[nn.Module] | None = None
        self._low_rank: list[LowRank] = []
        self._finished = 0
        self._low_rank_steps = 0  # of the optimizer of "lowrank"

    @property
    def steps(self) -> int:
        made = self._low_rank_steps if self.config.mode == "lowrank" else self._counted()
        return self._resumed + made

    @steps.setter
    def steps(self, value: int) -> None:
        self._resumed += value - self.steps
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
                raise ConfigError.of("ssdtrain.compact", self.config.mode, why, allowed)
        if self.config.mode == "lowrank":
            first = not self._low_rank  # one optimizer has the layers of all models
            made = self._low_rank_step if first else None
            self._low_rank.append(LowRank(model, layers, self.compression, self.optimizer, made))
        else:
            for layer in layers:
                compact = CompactLayer(layer, self.compression)
                self._forwards.append(CompactForward(layer.module, layer.kind, compact))
            self._activate()

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
        while self._forwards:
            self._forwards.pop().remove()
        while self._low_rank:
            self._low_rank.pop().restore()
        self.compression.forget()

    def _low_rank_step(self) -> None:
        self._low_rank_steps += 1
        for low_rank in self._low_rank:
            low_rank.advance()

    def on_forward(self, forward: Forward) -> AbstractContextManager[None]:
        return self._forget_after()

    def on_unended_step(self) -> str:
        quantised = self.compression.codec is not None
        return "" if quantised or self.step() else "compact: all forwards use the same projection"

    @contextmanager
    def _forget_after(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.compression.forget()

    def on_step_end(self, step: Step) -> None:
        self._finished += 1
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
