"""The metrics of a plan, whichever controller made it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.config.units import format_size
from ssdtrain.metrics import MetricSet, Reduce, Unit, counter, gauge
from ssdtrain.planner.model.types import DEVICE, Block, Choice, StepTimeline

__all__ = ["PeakLimit", "PlanMetrics"]

logger = logging.getLogger("ssdtrain")


@dataclass
class PlanMetrics(MetricSet):
    """The plan in effect, of `plan` or of `offload.amount: "auto"`. Bytes and seconds are predictions of the cost model."""

    plans: int = counter(Unit.COUNT, "plans")
    """Plans made since the start."""
    recomputed_blocks: int = gauge(Unit.COUNT, "recomputed blocks")
    """Blocks whose forward runs again in backward."""
    compressed_blocks: int = gauge(Unit.COUNT, "compressed blocks")
    """Blocks whose linear layers keep compressed inputs by the plan."""
    encoded_blocks: int = gauge(Unit.COUNT, "encoded blocks")
    """Blocks whose saved tensors stay in the memory that they are in, encoded."""
    offloaded_blocks: int = gauge(Unit.COUNT, "offloaded blocks")
    """Blocks whose saved tensors go to the tiers. With `amount: "auto"` a block is a few neighbouring saved tensors."""
    planned_bytes: int = gauge(Unit.BYTES, "planned to offload")
    """Bytes of one microbatch that these blocks save, over all model chunks of the rank."""
    predicted_peak_bytes: int = gauge(Unit.BYTES)
    """Largest bytes of activations on the device at once."""
    predicted_step_ratio: float = gauge(Unit.COUNT, ranks=Reduce.MAX)
    """Predicted step time over that of keeping everything."""
    idle_steps: int = counter(Unit.COUNT, "steps without hooks")
    """Steps whose forwards ran without saved-tensor hooks, since nothing was worth offloading."""
    over_limit_bytes: int = gauge(Unit.BYTES, ranks=Reduce.MAX)
    """Bytes of activations above the limit (`plan.device_limit`, `offload.device_budget`) in the latest step; 0: within it."""

    def update(
        self,
        blocks: Sequence[Block],
        choices: Sequence[Choice],
        predicted: StepTimeline,
        kept: StepTimeline,
    ) -> None:
        """Count one more plan, and set the gauges to it.

        Args:
            blocks: over all chunks.
            choices: one for each block.
            predicted: the step under the plan.
            kept: the step that keeps everything.
        """
        self.plans += 1
        self.recomputed_blocks = sum(choice.recompute for choice in choices)
        self.compressed_blocks = sum(choice.compress for choice in choices)
        self.encoded_blocks = sum(choice.encode for choice in choices)
        offloaded = [
            _offloaded(block, choice)
            for block, choice in zip(blocks, choices, strict=True)
            if choice.tier != DEVICE and not choice.recompute
        ]
        self.offloaded_blocks, self.planned_bytes = len(offloaded), sum(offloaded)
        self.predicted_peak_bytes = predicted.peak_bytes
        self.predicted_step_ratio = predicted.seconds / kept.seconds


def _offloaded(block: Block, choice: Choice) -> int:
    """Bytes that it saves and that leave."""
    if choice.shares:
        return sum(round(share * part.saved) for share, part in zip(choice.shares, block.parts, strict=False))
    return round(block.saved * choice.share)


class PeakLimit:
    """Compares what steps had in memory with the limit of the config, and says where it was not kept to.

    Args:
        key: of the limit, in the config.
        nbytes: the limit; None: there is none.
        metric: whose `over_limit_bytes` is set.
    """

    def __init__(self, key: str, nbytes: int | None, metric: PlanMetrics) -> None:
        self._key, self._nbytes, self._metric = key, nbytes, metric
        self._settled = 0  # steps of the plan
        self._warned = False

    def planned(self) -> None:
        """A plan begins that was not followed before."""
        self._settled, self._warned = 0, False

    def step_ended(self, peak: int, *, planned: bool) -> None:
        """A step ends in which `peak` bytes were alive at most; `planned`: it followed a plan. The first step of a plan begins
        with what is left of the one before. Logged once for each plan."""
        if self._nbytes is None:
            return
        self._metric.over_limit_bytes = over = max(0, peak - self._nbytes)
        self._settled += planned
        if over and self._settled > 1 and not self._warned:
            self._warned = True
            logger.warning(
                "%s of %s is not kept to: a step that followed the plan had %s of activations at its peak. No plan that was "
                "found has a lower one, or forwards vary in size: use a smaller batch, recomputation (section plan) or faster "
                "drives",
                self._key,
                format_size(self._nbytes),
                format_size(peak),
            )
