"""What the plans of a job's pipeline stages come to: seconds and bytes of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ssdtrain.planner.plans import Plan, SearchProblem
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_state import StatePlacement

__all__ = ["ClusterPlan", "Stage"]


@dataclass(frozen=True)
class Stage:
    """The plan of the first or last pipeline stage.

    Attributes:
        plans: best first.
        alive: microbatches between forward and backward.
        simulated: microbatches that the plans' time lines play.
        budget: bytes that activations may take on the device.
        placement: where model state is.
        slowdown: over keeping everything with model state there, minus 1, at most; None: no limit.
    """

    last: bool
    problem: SearchProblem
    plans: list[Plan]
    alive: int
    simulated: int
    budget: int
    placement: StatePlacement
    slowdown: float | None = None

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    def seconds(self, plan: Plan) -> float:
        """Seconds of one microbatch, forward and backward."""
        return plan.seconds / self.simulated

    @property
    def compute_seconds(self) -> float:
        """Seconds of one microbatch with everything kept."""
        return sum(block.forward + block.backward for block in self.problem.blocks)

    @property
    def state(self) -> dict[str, int]:
        """Bytes of model state on the device, by what they are."""
        return self.placement.device

    @property
    def optimizer_seconds(self) -> float:
        """Seconds that the device waits for the optimizer in a step."""
        backward = sum(
            block.backward + (block.recompute if action == "recompute" else 0.0)
            for block, action in zip(self.problem.blocks, self.plan.actions, strict=True)
        )
        return self.placement.optimizer_seconds(backward)

    def written(self, microbatches: int) -> float:
        """Bytes to SSD in a step, of activations and model state."""
        return self.plan.written / self.simulated * microbatches + self.placement.written_by_optimizer


@dataclass(frozen=True)
class ClusterPlan:
    """What a job comes to at one microbatch size."""

    job: ClusterJob
    microbatch: int
    stages: list[Stage]

    @cached_property
    def slowest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.seconds(stage.plan))

    @property
    def microbatches(self) -> int:
        return self.job.microbatches(self.microbatch)

    @property
    def microbatch_seconds(self) -> float:
        """Seconds of the slowest stage, with those of the network under ZeRO-3 that it does not hide."""
        return self.job.with_sharding(self.slowest.seconds(self.slowest.plan))

    @property
    def bubble_seconds(self) -> float:
        layout = self.job.layout
        return (layout.pp - 1) / layout.virtual * self.microbatch_seconds

    @property
    def step_seconds(self) -> float:
        busy = self.microbatches * self.microbatch_seconds
        return busy + self.bubble_seconds + sum(self.update_seconds)

    @property
    def update_seconds(self) -> tuple[float, float]:
        """(reducing gradients over dp, optimizer)."""
        reducing, _ = self.job.update_seconds()
        return reducing, max(stage.optimizer_seconds for stage in self.stages)

    @property
    def ideal_seconds(self) -> float:
        """Seconds of a step if everything fitted into the device: no recomputation and no stall, and the optimizer where it is
        faster."""
        each = self.job.with_sharding(max(stage.compute_seconds for stage in self.stages))
        layout = self.job.layout
        reducing, updating = self.job.update_seconds()
        update = reducing + min(updating, self.update_seconds[1])
        return (self.microbatches + (layout.pp - 1) / layout.virtual) * each + update

    @property
    def tokens_per_second(self) -> float:
        sequences = self.microbatches * self.microbatch * self.job.layout.dp
        return sequences * self.job.model.sequence / self.step_seconds

    @property
    def flops_per_gpu(self) -> float:
        """FLOPs of the model (recomputation not counted), per second."""
        model, kinds = self.job.model, self.job.model.block_kinds
        forward = sum(model.block_flops(self.microbatch, kind) for kind in kinds) + model.head_flops(
            self.microbatch
        )
        return (
            3 * forward * self.microbatches * self.job.layout.dp / self.step_seconds / self.job.layout.ranks
        )

    def written_per_step(self) -> float:
        """Bytes that the busiest GPU writes to SSD, of activations and model state."""
        return max(stage.written(self.microbatches) for stage in self.stages)

    def needed_bandwidth(self) -> float:
        """Bytes per second that one GPU must write for all that is offloaded to hide: half of a microbatch's time is forward's
        and must take its writes, as SSDTrain reckons (arXiv 2408.10013)."""
        return max(
            2 * stage.plan.written / stage.simulated / stage.seconds(stage.plan) for stage in self.stages
        )

    def life_seconds(self) -> float | None:
        """Return the seconds until the drives are worn at this rate; None: nothing is written, or their endurance is unknown."""
        ssds = self.job.ssds
        written = self.written_per_step() * self.job.local_node
        if ssds is None or not ssds.endurance or not written:
            return None
        return ssds.endurance * ssds.count / written * self.step_seconds
