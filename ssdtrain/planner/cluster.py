"""Plans of a training job on machines that are not at hand: a plan of each pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.cluster_job import Job
from ssdtrain.planner.cluster_state import Placement, placements
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, Problem, actions_for
from ssdtrain.planner.search import search
from ssdtrain.planner.step import StepTimeline, one_forward_one_backward
from ssdtrain.planner.timeline import kept_step

__all__ = ["ClusterPlan", "Stage", "best_plan", "plan_job", "problem_of"]


@dataclass(frozen=True)
class Stage:
    """The plan of the first or last pipeline stage.

    Attributes:
        plans: best first.
        alive: microbatches between forward and backward.
        simulated: microbatches that the plans' time lines play.
        budget: bytes that activations may take on the device.
        placement: where model state is.
    """

    last: bool
    problem: Problem
    plans: list[Plan]
    alive: int
    simulated: int
    budget: int
    placement: Placement

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    def seconds(self, plan: Plan) -> float:
        """Of one microbatch, forward and backward."""
        return plan.seconds / self.simulated

    @property
    def compute_seconds(self) -> float:
        """Of one microbatch with everything kept."""
        return sum(block.forward + block.backward for block in self.problem.blocks)

    @property
    def state(self) -> dict[str, int]:
        """Bytes of model state on the device, by what they are."""
        return self.placement.device

    @property
    def optimizer_seconds(self) -> float:
        """That the device waits for the optimizer in a step."""
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

    job: Job
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
        """Of the slowest stage, or of the network under ZeRO-3 where that takes longer."""
        return max(self.slowest.seconds(self.slowest.plan), self.job.sharding_seconds)

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
        """Of a step if everything fitted into the device: no recomputation and no stall, and the optimizer where it is faster."""
        each = max(self.job.sharding_seconds, *(stage.compute_seconds for stage in self.stages))
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
        """Of the model (recomputation not counted), per second."""
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
        """Of the drives at this rate; None: nothing is written, or their endurance is not known."""
        ssds = self.job.ssds
        written = self.written_per_step() * self.job.local_node
        if ssds is None or not ssds.endurance or not written:
            return None
        return ssds.endurance * ssds.count / written * self.step_seconds


def plan_job(
    job: Job,
    microbatch: int,
    limits: Limits | None = None,
    objective: Objective | None = None,
    slowdown: float | None = None,
    places: Sequence[Sequence[Placement]] | None = None,
) -> ClusterPlan:
    """The best plan at one microbatch size.

    Args:
        limits: beside the device's memory; `written` is bytes per microbatch.
        slowdown: of a microbatch over keeping everything with model state in the same place, minus 1, at most; in place of
            `limits.seconds`.
        places: of model state, that are tried at each of `job.ends`; None: all.

    Raises:
        NoPlan: activations do not fit, whatever is done.
        InvalidValue: model state alone does not fit, or the batch is no multiple of the microbatch.
    """
    count = job.microbatches(microbatch)
    if not count:
        raise InvalidValue(
            f"has a batch of {job.batch} sequences for microbatches of {microbatch} on {job.layout.dp} data-parallel ranks",
            "a multiple",
        )
    given, objective = limits or Limits(), objective or Objective()
    if places is None:
        places = [placements(job, last) for last in job.ends]
    stages = [_plan_stage(job, microbatch, tried, given, objective, slowdown) for tried in places]
    return ClusterPlan(job, microbatch, stages)


def simulated_microbatches(job: Job, microbatch: int, last: bool) -> tuple[int, int]:
    """Those alive at once, and those that a time line plays."""
    count = job.microbatches(microbatch)
    alive = job.alive(last, count)
    return alive, min(count, alive + 2)


def problem_of(job: Job, microbatch: int, place: Placement) -> tuple[Problem, int]:
    """What is searched for a pipeline stage whose model state is there, and bytes for activations on the device."""
    plain = job.blocks(microbatch, place.last)
    alive, simulated = simulated_microbatches(job, microbatch, place.last)
    machine = job.machine(max(block.saved for block in plain), place.away, place.buffers)
    problem = Problem(
        [place.blocks(plain, job.microbatches(microbatch))],
        one_forward_one_backward(simulated, alive),
        machine,
        actions_for(machine, recompute=job.recompute),
        frozenset(number for number, block in enumerate(plain) if block.name == "head"),
    )
    return problem, job.gpu.memory - job.reserve - sum(place.device.values())


def _plan_stage(
    job: Job,
    microbatch: int,
    places: Sequence[Placement],
    limits: Limits,
    objective: Objective,
    slowdown: float | None,
) -> Stage:
    """The best plan of these placements of model state."""
    last = places[0].last
    alive, simulated = simulated_microbatches(job, microbatch, last)
    count = job.microbatches(microbatch)
    per_step = None if limits.written is None else limits.written * simulated

    def value(place: Placement, problem: Problem, plan: Plan) -> float:
        stage = Stage(last, problem, [plan], alive, simulated, 0, place)
        time = stage.seconds(plan) * count + stage.optimizer_seconds
        memory = plan.peak + sum(place.device.values())
        return objective.time * time + objective.memory * memory + objective.wear * stage.written(count)

    def at_least(place: Placement, problem: Problem) -> float:
        """With everything kept, whose memory and writes of activations count nothing."""
        kept = ("keep",) * len(problem.blocks)
        seconds = kept_step(problem).seconds
        return value(place, problem, Plan(kept, StepTimeline(seconds, seconds, 0.0, 0.0, 0.0, 0, 0.0)))

    best: tuple[float, Stage] | None = None
    failed: NoPlan | None = None
    tried = [(place, *problem_of(job, microbatch, place)) for place in places]
    bounds = [at_least(place, problem) for place, problem, _ in tried] if len(tried) > 1 else [0.0]
    for bound, (place, problem, budget) in sorted(zip(bounds, tried, strict=True), key=lambda one: one[0]):
        if best is not None and bound >= best[0]:
            break
        seconds = limits.seconds if slowdown is None else (1 + slowdown) * kept_step(problem).seconds
        try:
            plans = search(problem, Limits(budget, per_step, seconds), objective)
        except NoPlan as error:
            if failed is None or error.nearer_than(failed):
                failed = error
            continue
        found = value(place, problem, plans[0])
        if best is None or found < best[0]:
            best = found, Stage(last, problem, plans, alive, simulated, budget, place)
    if best is None:
        assert failed is not None
        raise failed
    return best[1]


def sizes(job: Job) -> Iterator[int]:
    """Microbatch sizes that divide the batch, by about a factor of sqrt(2)."""
    given = 1
    while given <= 4096:
        if job.microbatches(given):
            yield given
        given = max(given + 1, math.ceil(given * 1.4)) if not job.batch else given + 1


def best_plan(
    job: Job,
    limits: Limits | None = None,
    objective: Objective | None = None,
    slowdown: float | None = None,
    value: Callable[[ClusterPlan], float] = attrgetter("tokens_per_second"),
) -> tuple[ClusterPlan, int]:
    """The plan of the largest `value` over all microbatch sizes (among those within 1% the largest), and the largest microbatch
    that fits at all.

    Raises:
        NoPlan, InvalidValue: no microbatch fits.
    """
    found: list[ClusterPlan] = []
    failed: NoPlan | None = None
    for size in sizes(job):
        try:
            found.append(plan_job(job, size, limits, objective, slowdown))
        except NoPlan as error:
            if failed is None or error.too_slow:
                failed = error
            if found or not error.too_slow:
                break
    if not found:
        assert failed is not None
        raise failed
    most = max(map(value, found))
    return [plan for plan in found if value(plan) >= 0.99 * most][-1], found[-1].microbatch
