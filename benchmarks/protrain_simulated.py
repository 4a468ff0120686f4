"""The joint plan beside ZeRO-Offload on ProTrain's machine, by the cost model: nothing is run.

A GPT-2 of 10 billion parameters (5 on the smaller GPU), as wide as ProTrain's, on one of its GPUs, in bf16, at the same memory
limit. ZeRO-Offload keeps all parameters on the GPU, sends gradients to the host while backward makes them, recomputes every block
or none, and steps on the CPU when backward is over, before the parameters come back. The joint plan chooses how many blocks'
parameters stay, how many pass, and which blocks are recomputed, kept or offloaded to host memory; the CPU steps a block when its
backward is over, while backward goes on (`state.optimizer: "cpu"`), and what stays on the GPU comes back behind that. The
embedding is stepped last, when all is over.

What the overlap can win is bounded: with nothing recomputed and everything hidden a step takes what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.simulated_device import GPT_OPERATORS, GPT_PARTS
from ssdtrain.config.units import GiB
from ssdtrain.planner.finder import Goal, PlanFinder
from ssdtrain.planner.joint import StateCosts
from ssdtrain.planner.model.types import Block, Link, Machine, Tier, one_after_the_other
from ssdtrain.planner.plans import SearchProblem, actions_for, kept_step, play
from ssdtrain.state.plan import StateChunk
from ssdtrain.tools.whatif.cluster_job import transfer_budgets

__all__ = ["simulated"]

HIDDEN, SEQUENCE, VOCABULARY = 4096, 1024, 50257


@dataclass(frozen=True)
class Gpu:
    """A GPU of the paper and its host.

    Attributes:
        layers: of the model.
        memory: bytes for parameters, activations and buffers: a tenth is left for workspaces.
        flops: per second, half of the peak of bf16.
        link: bytes per second each way.
        cpu: parameters per second that Adam steps on the CPU (ZeRO-Offload, arXiv 2101.06840, table 4: a billion in 0.25 s).
    """

    name: str
    layers: int
    memory: int
    flops: float
    link: float
    cpu: float = 4e9


GPUS = (
    Gpu("rtx3090", 24, int(0.9 * 24 * GiB), 35.5e12, 12e9),
    Gpu("a100", 48, int(0.9 * 80 * GiB), 156e12, 24e9),
)


def _problem(gpu: Gpu, batch: int, *, overlapped: bool = True) -> SearchProblem:
    """What is searched; `overlapped`: with the steps on the CPU and what they move."""
    tokens = batch * SEQUENCE
    parameters = 12 * HIDDEN * HIDDEN
    forward = (2 * parameters + 4 * SEQUENCE * HIDDEN) * tokens / gpu.flops
    saved, inputs = 34 * tokens * HIDDEN, 2 * tokens * HIDDEN  # with attention that saves no scores
    parts = tuple(
        Block(
            "",
            share * forward,
            2 * share * forward,
            part * saved // GPT_PARTS,
            first_operator=share * forward,
        )
        for part, share in GPT_OPERATORS
    )
    embedding = 2 * VOCABULARY * HIDDEN
    step = {"backward_stores": embedding, "cpu_step": embedding / 2 / gpu.cpu, "returns": embedding}
    blocks = [Block("wte", 0.0, 0.0, 0, **(step if overlapped else {}))]  # type: ignore[arg-type]
    blocks += [
        Block(f"h.{number}", forward, 2 * forward, saved, recompute=forward, inputs=inputs, parts=parts)
        for number in range(gpu.layers)
    ]
    head = 2 * VOCABULARY * HIDDEN * tokens / gpu.flops
    logits = 6 * tokens * VOCABULARY  # bf16, and in float32
    blocks.append(Block("head", head, 2 * head, 0, small=logits))
    tier, link = Tier("host", gpu.link, gpu.link), Link(gpu.link, gpu.link)
    machine = Machine((tier,), link, **transfer_budgets(blocks))
    nbytes = 2 * parameters
    stepped = nbytes if overlapped else 0
    chunks = [
        StateChunk(f"h.{number}", nbytes, nbytes, nbytes, 2 * nbytes, stepped) for number in range(gpu.layers)
    ]
    state = StateCosts(chunks, 2 * embedding, stepping=1 / (2 * gpu.cpu), steps_inside=True)
    return SearchProblem(
        [blocks], one_after_the_other(), machine, actions_for(machine), by_parts=True, state=state
    )


def _seconds_of_adam(gpu: Gpu) -> float:
    return (12 * HIDDEN * HIDDEN * gpu.layers + VOCABULARY * HIDDEN) / gpu.cpu


def zero_offload(gpu: Gpu, batch: int) -> float | None:
    """Seconds of a step: all parameters are there, the optimizer comes after backward, and every block is recomputed, or none
    where that fits. None: it does not fit."""
    problem = _problem(gpu, batch, overlapped=False)
    assert problem.state is not None
    staying = problem.under(problem.state.choice(gpu.layers, 2))
    parameters = 24 * HIDDEN * HIDDEN * gpu.layers
    buffers = 4 * 12 * HIDDEN * HIDDEN * 2  # two of gradients in either direction
    found = []
    for action in ("keep", "recompute"):
        plan = play(staying, [action if block.inputs else "keep" for block in problem.blocks])
        # Gradients are hidden behind backward if the link is fast enough.
        again = sum(block.recompute for block in problem.blocks) if action == "recompute" else 0.0
        late = max(0.0, parameters / gpu.link - again - sum(block.backward for block in problem.blocks))
        if plan.peak + buffers <= gpu.memory:
            found.append(plan.seconds + late + _seconds_of_adam(gpu) + parameters / gpu.link)
    return min(found, default=None)


def joint_plan(gpu: Gpu, batch: int, limit: int) -> tuple[float, str]:
    """Seconds of a step of the joint plan within `limit`, and the plan in words."""
    problem = _problem(gpu, batch)
    assert problem.state is not None
    plan = PlanFinder(Goal(limit), None).find(problem, kept_step(problem)).plans[0]  # type: ignore[arg-type]
    assert plan.state is not None
    words = f"{plan.summary()}; {plan.state.persistent} of {gpu.layers} blocks' parameters stay"
    return plan.seconds, f"{words}; {plan.timeline.step_wait:.2f} s wait for the CPU"


def simulated(note: Callable[[str], None], batches: Sequence[int] = (1, 4, 8, 16)) -> dict[str, Any]:
    """For each GPU and batch at which ZeRO-Offload fits: the throughput over it, and the most that any plan could have.

    Args:
        note: is told what comes next.
    """
    rows: list[dict[str, Any]] = []
    for gpu in GPUS:
        for batch in batches:
            note(f"a plan for {gpu.name}, batch {batch}")
            theirs = zero_offload(gpu, batch)
            if theirs is None:
                continue
            ours, words = joint_plan(gpu, batch, gpu.memory)
            computed = sum(block.forward + block.backward for block in _problem(gpu, batch).blocks)
            rows.append(
                {
                    "gpu": gpu.name,
                    "batch": batch,
                    "throughput_over_zero_offload": theirs / ours,
                    "bound": theirs / computed,
                    "plan": words,
                }
            )
    best = max(rows, key=lambda row: row["throughput_over_zero_offload"])
    return {
        "throughput_over_zero_offload_simulated": best["throughput_over_zero_offload"],
        "throughput_over_zero_offload_simulated_lowest": min(
            row["throughput_over_zero_offload"] for row in rows
        ),
        "simulated": rows,
    }
