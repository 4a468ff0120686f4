"""Plans of a training job on machines that are not at hand: shapes and published figures in, a plan of each pipeline stage out.

What is assumed, beside `ssdtrain.planner.models` and `hardware`: a block's backward takes twice its forward; tensor-parallel
all-reduces (two in forward, two in backward) are not overlapped; gradients are reduced after the last backward; drives are
shared evenly by the GPUs of a node. Interleaved stages are planned as if a rank's blocks were one chunk, with the microbatches
alive that the interleaved schedule has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import GiB, format_size
from ssdtrain.planner.hardware import LINK_EFFICIENCY, MATMUL_EFFICIENCY, Gpu, Ssds
from ssdtrain.planner.models import BlockKind, Layout, Transformer, model_state_bytes
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, Problem, actions_for
from ssdtrain.planner.search import search
from ssdtrain.planner.step import Block, Link, Machine, Tier, one_forward_one_backward

__all__ = ["ClusterPlan", "Job", "Stage", "best_plan", "plan_job"]

OPTIMIZER_TRAFFIC = 28
"""Bytes of device memory that Adam in mixed precision reads and writes per parameter."""

ITEMSIZE = 2


@dataclass(frozen=True)
class Job:
    """A model, how it is spread, and what it runs on.

    Attributes:
        batch: sequences in a step, over all data-parallel ranks; 0: as many as fill the pipeline four times.
        ssds: of one node; None: none.
        host: bytes of host memory per node for offloaded activations; 0: none.
        network: bytes per second of one GPU to another node.
        node: GPUs of a node, which share its drives and host memory.
        reserve: bytes of device memory for the driver, communication buffers and fragmentation.
        efficiency: part of the GPU's peak FLOP rate that computation reaches.
        gradient, optimizer: bytes per parameter of gradients and of optimizer state (12: Adam with a float32 copy; 0: plain SGD).
        recompute: may be chosen.
    """

    model: Transformer
    layout: Layout
    gpu: Gpu
    ssds: Ssds | None = None
    host: int = 0
    batch: int = 0
    network: float = 50e9
    node: int = 8
    reserve: int = 4 * GiB
    efficiency: float = MATMUL_EFFICIENCY
    gradient: int = 2
    optimizer: int = 12
    recompute: bool = True

    def __post_init__(self) -> None:
        blocks, chunks = len(self.model.block_kinds), self.layout.pp * self.layout.virtual
        if blocks % chunks:
            raise InvalidValue(
                f"has {blocks} blocks on {chunks} pipeline chunks", "a number of blocks that they divide"
            )
        if self.model.heads % self.layout.tp or self.model.hidden % self.layout.tp:
            raise InvalidValue(
                f"has {self.model.heads} heads and hidden {self.model.hidden} on {self.layout.tp} tensor-parallel ranks",
                "a number of ranks that divides both",
            )
        if not 0 < self.efficiency <= 1:
            raise InvalidValue(f"has the efficiency {self.efficiency}", "above 0, at most 1")

    @property
    def local_node(self) -> int:
        """GPUs that share a node's drives."""
        return min(self.node, self.layout.ranks)

    def microbatches(self, microbatch: int) -> int:
        """Of one step, on each data-parallel rank; 0: the batch is no multiple."""
        if not self.batch:
            return 4 * self.layout.pp
        each, rest = divmod(self.batch, microbatch * self.layout.dp)
        return 0 if rest else each

    def rank_parameters(self, last: bool) -> float:
        """Of the first or the last pipeline stage, on one tensor-parallel rank."""
        model, layout = self.model, self.layout
        blocks = sum(model.block_parameters(kind) for kind in self.stage_kinds(last))
        ends = 0 if last else model.embedding_parameters()
        if last or layout.pp == 1:
            ends += model.head_parameters()
            if model.tied and layout.pp > 1:
                ends += model.vocabulary * model.hidden
        shared, experts = blocks, 0  # experts are spread over ranks of their own
        if model.experts > 1:
            each = 3 * model.hidden * model.ffn
            experts = len(self.stage_kinds(last)) * model.experts * each
            shared -= experts
        return (shared + ends + experts / layout.expert) / layout.tp

    def stage_kinds(self, last: bool) -> tuple[BlockKind, ...]:
        kinds = self.model.block_kinds
        each = len(kinds) // self.layout.pp
        return kinds[-each:] if last else kinds[:each]

    def state_bytes(self, last: bool) -> dict[str, int]:
        """Of one rank, by what they are."""
        parameters = self.rank_parameters(last)
        found = model_state_bytes(parameters, self.layout, gradient=self.gradient, optimizer=self.optimizer)
        if self.layout.zero >= 3:
            found["gathered parameters"] = int(2 * ITEMSIZE * self.model.block_parameters() / self.layout.tp)
        return found

    def blocks(self, microbatch: int, last: bool) -> list[Block]:
        """Of the first or the last pipeline stage."""
        model, layout = self.model, self.layout
        rate = layout.tp * self.gpu.flops * self.efficiency
        tokens = microbatch * model.sequence
        message = tokens * model.hidden * ITEMSIZE
        reduced = 2 * (layout.tp - 1) / layout.tp * message / (self.tp_rate * LINK_EFFICIENCY)
        inputs = model.block_input_bytes(microbatch, layout)
        wide = tokens * model.ffn * (model.top_k if model.experts > 1 else 1) * ITEMSIZE // layout.tp
        found = []
        for number, kind in enumerate(self.stage_kinds(last)):
            computing = model.block_flops(microbatch, kind) / rate
            reduces = 3 if kind == "decoder" else 2
            found.append(
                Block(
                    f"{kind} {number}",
                    computing + reduces * reduced,
                    2 * computing + reduces * reduced,
                    saved=model.saved_bytes(microbatch, layout, kind),
                    recompute=computing + reduces * reduced,
                    inputs=inputs,
                    # Gradients of the MLP's inner tensors and of the residual.
                    backward_transient=2 * wide + message,
                )
            )
        if last or layout.pp == 1:
            computing = model.head_flops(microbatch) / rate
            found.append(
                Block(
                    "head",
                    computing,
                    2 * computing,
                    saved=model.head_saved_bytes(microbatch, layout),
                    backward_transient=model.head_transient_bytes(microbatch, layout),
                )
            )
        return found

    @property
    def tp_rate(self) -> float:
        return self.gpu.peer_rate if self.layout.tp <= self.node else self.network

    def machine(self, largest: int) -> Machine:
        """For one rank; buffers hold one block on the device, two ahead and four on their way to a drive.

        Args:
            largest: bytes that the largest block saves.
        """
        link = self.gpu.host_rate * LINK_EFFICIENCY
        tiers = []
        if self.host:
            tiers.append(Tier("host", link, link, capacity=self.host // self.local_node))
        if self.ssds is not None:
            each = self.ssds.write_rate / self.local_node, self.ssds.read_rate / self.local_node
            tiers.append(Tier("ssd", min(each[0], link), min(each[1], link)))
        return Machine(
            tuple(tiers), Link(link, link), in_flight=4 * largest, prefetch=2 * largest, window=largest
        )

    def alive(self, last: bool, microbatches: int) -> int:
        """Microbatches between forward and backward, at most."""
        layout = self.layout
        if last:
            return 1
        chunks = (
            layout.pp if layout.virtual == 1 else (layout.virtual - 1) * layout.pp + 2 * (layout.pp - 1) + 1
        )
        return min(microbatches, -(-chunks // layout.virtual))

    @property
    def ends(self) -> tuple[bool, ...]:
        """Pipeline stages that are planned, by whether they are the last one."""
        return (False, True) if self.layout.pp > 1 else (False,)

    def bandwidth_for_all(self, microbatch: int) -> float:
        """Bytes per second that one GPU would have to write if every block were offloaded and nothing were recomputed."""
        stages = [self.blocks(microbatch, last) for last in self.ends]
        return max(
            2 * sum(b.saved for b in stage) / sum(b.forward + b.backward for b in stage) for stage in stages
        )

    def update_seconds(self) -> tuple[float, float]:
        """(reducing gradients over dp, optimizer) of the larger stage."""
        layout = self.layout
        parameters = max(self.rank_parameters(False), self.rank_parameters(True))
        rate = self.gpu.peer_rate if layout.ranks <= self.node else self.network
        volume = 2 * (layout.dp - 1) / layout.dp * parameters * ITEMSIZE * (1.5 if layout.zero >= 3 else 1)
        split = layout.dp if layout.zero else 1
        return (
            volume / (rate * LINK_EFFICIENCY),
            parameters * OPTIMIZER_TRAFFIC / split / self.gpu.memory_rate,
        )


@dataclass(frozen=True)
class Stage:
    """The plan of the first or last pipeline stage.

    Attributes:
        plans: best first.
        alive: microbatches between forward and backward.
        simulated: microbatches that the plans' time lines play.
        budget: bytes that activations may take on the device.
    """

    last: bool
    problem: Problem
    plans: list[Plan]
    alive: int
    simulated: int
    budget: int
    state: dict[str, int]

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
    def bubble_seconds(self) -> float:
        layout = self.job.layout
        return (layout.pp - 1) / layout.virtual * self.slowest.seconds(self.slowest.plan)

    @property
    def step_seconds(self) -> float:
        busy = self.microbatches * self.slowest.seconds(self.slowest.plan)
        return busy + self.bubble_seconds + sum(self.job.update_seconds())

    @property
    def ideal_seconds(self) -> float:
        """Of a step if everything fitted into the device: no recomputation and no stall."""
        each = max(stage.compute_seconds for stage in self.stages)
        layout = self.job.layout
        return (self.microbatches + (layout.pp - 1) / layout.virtual) * each + sum(self.job.update_seconds())

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
        """Bytes that the busiest GPU writes to SSD."""
        return max(stage.plan.written / stage.simulated for stage in self.stages) * self.microbatches

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
) -> ClusterPlan:
    """The best plan at one microbatch size.

    Args:
        limits: beside the device's memory; `written` is bytes per microbatch.
        slowdown: of a microbatch over keeping everything, minus 1, at most; in place of `limits.seconds`.

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
    stages = []
    for last in job.ends:
        state = job.state_bytes(last)
        budget = job.gpu.memory - job.reserve - sum(state.values())
        if budget <= 0:
            parts = ", ".join(f"{name} {format_size(size)}" for name, size in state.items())
            raise InvalidValue(
                f"needs {format_size(sum(state.values()))} of model state per GPU ({parts}) beside {format_size(job.reserve)} of "
                f"reserve, and {job.gpu.name} has {format_size(job.gpu.memory)}",
                "more tensor, pipeline or ZeRO parallelism, or a larger GPU",
            )
        blocks = job.blocks(microbatch, last)
        machine = job.machine(max(block.saved for block in blocks))
        alive = job.alive(last, count)
        simulated = min(count, alive + 2)
        head = frozenset(number for number, block in enumerate(blocks) if block.name == "head")
        problem = Problem(
            [blocks],
            one_forward_one_backward(simulated, alive),
            machine,
            actions_for(machine, recompute=job.recompute),
            head,
        )
        given = limits or Limits()
        per_step = None if given.written is None else given.written * simulated
        kept = simulated * sum(block.forward + block.backward for block in blocks)
        seconds = given.seconds if slowdown is None else (1 + slowdown) * kept
        plans = search(problem, Limits(budget, per_step, seconds), objective)
        stages.append(Stage(last, problem, plans, alive, simulated, budget, state))
    return ClusterPlan(job, microbatch, stages)


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
        NoPlan, InvalidValue: not even the smallest microbatch fits.
    """
    found: list[ClusterPlan] = []
    for size in sizes(job):
        try:
            found.append(plan_job(job, size, limits, objective, slowdown))
        except NoPlan:
            if not found:
                raise
            break
    most = max(map(value, found))
    return [plan for plan in found if value(plan) >= 0.99 * most][-1], found[-1].microbatch
