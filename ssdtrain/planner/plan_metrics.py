"""The metrics of a plan, whichever controller made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.planner.step import DEVICE, Block, Choice, StepTimeline
from ssdtrain.telemetry.registry import MetricSet, Reduce, Unit, counter, gauge

__all__ = ["PlanMetrics"]


@dataclass
class PlanMetrics(MetricSet):
    """The plan in effect, of `plan` or of `offload.amount: "auto"`. Bytes and seconds are predictions of the cost model."""

    plans: int = counter(Unit.COUNT, "plans")
    """Plans made since the start."""
    recomputed_blocks: int = gauge(Unit.COUNT, "recomputed blocks")
    """Blocks whose forward runs again in backward."""
    compressed_blocks: int = gauge(Unit.COUNT, "compressed blocks")
    """Blocks whose linear layers keep compressed inputs by the plan."""
    offloaded_blocks: int = gauge(Unit.COUNT, "offloaded blocks")
    """Blocks whose saved tensors go to the tiers. With `amount: "auto"` a block is a few neighbouring saved tensors."""
    planned_bytes: int = gauge(Unit.BYTES, "planned to offload")
    """Bytes of one microbatch that these blocks save, over all model chunks of the rank."""
    predicted_peak_bytes: int = gauge(Unit.BYTES)
    """Largest bytes of activations on the device at once."""
    predicted_step_ratio: float = gauge(Unit.COUNT, ranks=Reduce.MAX)
    """Predicted step time over that of keeping everything."""

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
        offloaded = [
            round(block.saved * choice.share)
            for block, choice in zip(blocks, choices, strict=True)
            if choice.tier != DEVICE and not choice.recompute
        ]
        self.offloaded_blocks, self.planned_bytes = len(offloaded), sum(offloaded)
        self.predicted_peak_bytes = predicted.peak_bytes
        self.predicted_step_ratio = predicted.seconds / kept.seconds
