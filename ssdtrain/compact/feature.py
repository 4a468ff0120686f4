"""Compressed inputs of linear layers as a feature of the runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from ssdtrain.compact.layers import CompactLayer, Compression, find_layers
from ssdtrain.compact.linear import CompactForward
from ssdtrain.config import CompactConfig, ConfigError, Problem
from ssdtrain.features import FIRST_STEPS, Feature, Forward, Placement, Step
from ssdtrain.telemetry.registry import MetricSet

__all__ = ["CompactLinear"]

logger = logging.getLogger("ssdtrain")


class CompactLinear(Feature):
    """Replaces the forwards of the linear layers of the models it is attached to, until `detach`.

    Attributes:
        compression: what the layers share.
        step: the number of the optimizer step that is under way, which keys projections. By default steps are counted from 0;
            an adapter sets what the framework counts, which goes on after a resume.
        rename: see `find_layers`; set before `attach`.
    """

    def __init__(self, config: CompactConfig, placement: Placement) -> None:
        self.config = config
        self.compression = Compression(config, placement.rank)
        self.steps = 0
        self.step: Callable[[], int] = lambda: self.steps
        self.compression.step = lambda: self.step()
        self.rename: Callable[[str, nn.Module], str] | None = None
        self._forwards: list[CompactForward] = []
        self._finished = 0

    def attach(self, model: nn.Module) -> None:
        """Raises ConfigError: no layer is found, or one is compressed already."""
        found = find_layers(model, self.config, self.rename)
        for layer in found:
            if isinstance(layer.module.__dict__.get("forward"), CompactForward):
                why = f"meets the layer {layer.name}, which another runtime compresses already"
                allowed = "closing that one first"
                raise ConfigError([Problem("ssdtrain.compact", self.config.mode, why, allowed)])
        for layer in found:
            self._forwards.append(
                CompactForward(layer.module, layer.kind, CompactLayer(layer, self.compression))
            )

    def detach(self) -> None:
        while self._forwards:
            self._forwards.pop().remove()
        self.compression.forget()

    def on_forward(self, forward: Forward) -> AbstractContextManager[None]:
        return self._forget_after()

    @contextmanager
    def _forget_after(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.compression.forget()

    def on_step_end(self, step: Step) -> None:
        self.steps += 1
        self._finished += 1
        self.compression.forget()
        counted = self.compression.counted
        if self._finished == FIRST_STEPS and not counted.input_bytes:
            logger.warning(
                "compact is enabled and compressed nothing in the first %d steps: %s",
                FIRST_STEPS,
                f"{counted.skipped_inputs} inputs are saved by what made them anyway"
                if counted.skipped_inputs
                else "no forward with gradients came to its layers, or their weights are frozen",
            )

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return (("compact", self.compression.counted),)

    def description(self) -> str:
        config = self.config
        what = config.codec if config.mode == "quant" else config.projection
        return f"linear layers keep compressed inputs: {config.mode} ({what})"

    def close(self) -> None:
        self.detach()
