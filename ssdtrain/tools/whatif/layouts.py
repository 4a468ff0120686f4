"""How a job is best spread over a number of GPUs: tensor, pipeline and data parallelism, and the stage of ZeRO.

Layouts are compared at one number of sequences a step. One is first judged by what does the same with every block (keep,
recompute, offload) at a few microbatch sizes; the fastest few are planned. Tensor parallelism stays in a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.plans import NoPlan
from ssdtrain.tools.whatif.cluster import BRIEF, plan_job, uniform_plan
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan
from ssdtrain.tools.whatif.models import ParallelLayout

__all__ = ["LayoutChoice", "choose_layout", "layout_text"]

USUAL_TOKENS = 1 << 22
"""Tokens of a step, where no batch is given."""

PLANNED = 3
"""Number of layouts, of those that are best with all blocks alike, that are planned."""

LARGEST_COMPARED = 32
"""Sequences of the largest microbatch that is tried while layouts are compared."""


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, and the next best.

    Attributes:
        job: with the layout.
        tokens_per_second: by a brief search, to compare layouts.
        next_best: layout and tokens per second; None: there is no other that fits.
        tried: number of layouts that were compared.
    """

    job: ClusterJob
    tokens_per_second: float
    next_best: tuple[ParallelLayout, float] | None
    tried: int

    def sentence(self) -> str:
        """Such as "TP 8, PP 2, DP 4, ZeRO 1, the fastest of 30; next best: TP 4, ... at 1.03 x the time"."""
        text = f"{layout_text(self.job.layout)}, the fastest of {self.tried}"
        if self.next_best is None:
            return f"{text}; no other one fits"
        layout, rate = self.next_best
        return f"{text}; next best: {layout_text(layout)} at {self.tokens_per_second / rate:.2f} x the time"


def layout_text(layout: ParallelLayout) -> str:
    """A layout in words."""
    text = f"TP {layout.tp}, PP {layout.pp}, DP {layout.dp}, ZeRO {layout.zero}"
    return f"{text}, sequence parallelism" if layout.sequence_parallel else text


def choose_layout(
    job: ClusterJob,
    gpus: int,
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    zero: int | None = None,
    microbatch: int | None = None,
) -> LayoutChoice:
    """Choose the layout with the most tokens per second on so many GPUs.

    Args:
        job: whose layout says what is not asked for: virtual stages and expert parallelism.
        tp, pp, dp, zero, microbatch: that are given.

    Raises:
        InvalidValue: the model cannot be spread over so many GPUs, or no layout has room for its state.
        NoPlan: no layout has room for activations.
    """
    sizes = _sizes if microbatch is None else partial(_size_given, microbatch)
    jobs = [one for one in _jobs(job, gpus, tp, pp, dp, zero) if sizes(one)]
    if not jobs:
        raise InvalidValue(
            f"cannot be spread over {gpus} GPUs: heads, blocks or the batch cannot be divided so",
            "another number of GPUs or --batch, or fewer of --tp, --pp and --dp",
        )
    # 1. All blocks alike.
    alike: list[tuple[float, int, ClusterJob]] = []
    failed: NoPlan | InvalidValue | None = None
    for number, one in enumerate(jobs):
        rate, error = _alike(one, sizes(one))
        if rate:
            alike.append((-rate, number, one))
        failed = failed or error
    # 2. The fastest are planned; where none fits so, all are.
    few = [one for *_, one in sorted(alike)[:PLANNED]] or jobs
    rates: list[tuple[float, int, ClusterJob]] = []
    for number, one in enumerate(few):
        try:
            rates.append((-_planned(one, sizes(one)), number, one))
        except (NoPlan, InvalidValue) as error:
            failed = failed or error
    if not rates:
        assert failed is not None
        raise failed
    (best, _, chosen), *others = sorted(rates)
    second = (others[0][2].layout, -others[0][0]) if others else None
    return LayoutChoice(chosen, -best, second, len(jobs))


def _jobs(
    job: ClusterJob, gpus: int, tp: int | None, pp: int | None, dp: int | None, zero: int | None
) -> Iterator[ClusterJob]:
    """The job in each layout that its shape allows, at one batch."""
    batch = job.batch or gpus * max(1, round(USUAL_TOKENS / (gpus * job.model.sequence)))
    for tensor in _divisors(gpus) if tp is None else [tp]:
        if tp is None and tensor > job.node:
            continue
        for stages in _divisors(gpus // tensor) if pp is None else [pp]:
            data, rest = divmod(gpus, tensor * stages)
            if rest or not data or (dp is not None and data != dp):
                continue
            for stage in _stages(data, stages) if zero is None else [zero]:
                try:
                    layout = replace(
                        job.layout,
                        tp=tensor,
                        pp=stages,
                        dp=data,
                        zero=stage,
                        sequence_parallel=job.layout.sequence_parallel or tensor > 1,
                    )
                    yield replace(job, layout=layout, batch=batch)
                except InvalidValue:
                    continue


def _stages(data: int, pipeline: int) -> list[int]:
    """Stages of ZeRO that are worth a trial: with pipelines gradients and weights stay whole."""
    if data == 1:
        return [0]
    return [1] if pipeline > 1 else [1, 2, 3]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _sizes(job: ClusterJob) -> list[int]:
    """Microbatches to compare layouts with: powers of two that divide the batch."""
    return [
        size for size in (1 << bit for bit in range(LARGEST_COMPARED.bit_length())) if job.microbatches(size)
    ]


def _size_given(microbatch: int, job: ClusterJob) -> list[int]:
    return [microbatch] if job.microbatches(microbatch) else []


def _alike(job: ClusterJob, sizes: Sequence[int]) -> tuple[float, NoPlan | InvalidValue | None]:
    """The most tokens per second with all blocks alike; 0 and an error: nothing fits."""
    best, failed = 0.0, None
    for size in sizes:
        fits = False
        for action in ("keep", *["recompute"] * job.recompute, *["ssd"] * (job.ssds is not None)):
            try:
                best = max(best, uniform_plan(job, size, action).tokens_per_second)
                fits = True
            except (NoPlan, InvalidValue) as error:
                failed = failed or error
        if not fits:
            break
    return best, failed


def _planned(job: ClusterJob, sizes: Sequence[int]) -> float:
    """The most tokens per second of brief searches. Raises NoPlan or InvalidValue: not one sequence fits."""
    found: list[ClusterPlan] = []
    for size in sizes:
        try:
            found.append(plan_job(job, size, effort=BRIEF))
        except NoPlan:
            if not found:
                raise
            break
    return max(plan.tokens_per_second for plan in found)
