"""What the planner says for the setting of a published figure."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.model.types import Block, Machine, Tier
from ssdtrain.planner.plans import HIDDEN, Limits, NoPlan, kept_step, play
from ssdtrain.planner.search import search
from ssdtrain.text import YEAR_SECONDS
from ssdtrain.tools.whatif.cluster import plan_job, problem_of
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_state import placements
from ssdtrain.tools.whatif.models import module_of

__all__ = [
    "bandwidth_for_all",
    "batch_gain",
    "flop_rate",
    "gain_over_recomputation",
    "largest_model",
    "life",
    "peak_reduction",
    "share_of_ideal",
]


def recomputed_seconds(job: ClusterJob, microbatch: int) -> float:
    """Of a step in which every block is recomputed."""
    each = max(
        sum(b.forward + b.backward + b.recompute for b in job.blocks(microbatch, last)) for last in job.ends
    )
    each = job.with_sharding(each)
    bubble = (job.layout.pp - 1) / job.layout.virtual
    return (job.microbatches(microbatch) + bubble) * each + sum(job.update_seconds())


def flop_rate(job: ClusterJob, microbatch: int) -> float:
    """TFLOP/s of a GPU with every block recomputed, recomputation counted (arXiv 2104.04473, equation 3)."""
    model = job.model
    forward = sum(model.block_flops(1, kind) for kind in model.block_kinds)
    flops = job.batch * (4 * forward + 3 * model.head_flops(1))
    return flops / recomputed_seconds(job, microbatch) / job.layout.ranks / 1e12


def bandwidth_for_all(job: ClusterJob, microbatch: int) -> float:
    """GB/s that a GPU writes if everything is offloaded."""
    return job.bandwidth_for_all(microbatch) / 1e9


def life(job: ClusterJob, microbatch: int) -> float:
    """Years of the drives of a node if everything is offloaded: half of the time is forward's and writes."""
    assert job.ssds is not None
    rate = job.bandwidth_for_all(microbatch) / 2 * job.local_node
    return job.ssds.endurance * job.ssds.count / rate / YEAR_SECONDS


def peak_reduction(job: ClusterJob, microbatch: int) -> float:
    """Percent by which the peak is lower than that of keeping everything, as SSDTrain does it."""
    kept, least = _by_modules(job, microbatch)
    return 100 * (1 - least / kept)


def batch_gain(job: ClusterJob, microbatch: int) -> float:
    """The largest batch with the peak that keeping everything has for `microbatch`, over that, as SSDTrain does it."""
    kept, _ = _by_modules(job, microbatch)
    size = microbatch
    while _by_modules(job, size + 1)[1] <= kept:
        size += 1
    return size / microbatch


def _by_modules(job: ClusterJob, microbatch: int) -> tuple[int, int]:
    """Bytes of the peak with everything kept, and as SSDTrain does it: modules (attention, MLP) leave one by one, all but the
    last one; their tensors go from the device to the drives directly, and are there until they are written; the next two modules
    are read ahead."""
    assert job.ssds is not None
    job = replace(job, gpu=replace(job.gpu, memory=10**13), batch=microbatch)
    problem, _ = problem_of(job, microbatch, placements(job, False)[0])
    modules = []
    for block in problem.blocks:
        for _, group in groupby(block.parts or (block,), key=lambda part: module_of(part.name)):
            parts = tuple(group)
            sums = {
                name: sum(getattr(part, name) for part in parts) for name in ("forward", "backward", "saved")
            }
            transient = max(part.backward_transient for part in parts)
            modules.append(Block(parts[0].name, **sums, backward_transient=transient, parts=parts))
    away = len(modules) - 2  # the last module and the head stay
    ahead = 2 * max(module.saved for module in modules[:away])
    drives = Tier("ssd", job.ssds.write_rate / job.local_node, job.ssds.read_rate / job.local_node)
    direct = replace(problem, chunks=[modules], machine=Machine((drives,), prefetch=ahead))
    kept = kept_step(direct)
    least = play(direct, [*["ssd"] * away, "keep", "keep"])
    assert least.seconds <= (1 + HIDDEN) * kept.seconds, "the paper's runs are as fast as without"
    return kept.peak_bytes, least.peak


def gain_over_recomputation(job: ClusterJob, microbatch: int) -> float:
    """Throughput of the plan over that of recomputing every block."""
    return recomputed_seconds(job, microbatch) / plan_job(job, microbatch).step_seconds


def largest_model(job: ClusterJob, microbatch: int) -> float | None:
    """Billions of parameters of the deepest model of this width that fits with every block recomputed."""

    def deep(layers: int) -> ClusterJob:
        return replace(job, model=replace(job.model, layers=layers))

    fits, too_deep = 0, 1
    while _fits_recomputed(deep(too_deep), microbatch):
        fits, too_deep = too_deep, 2 * too_deep
    while too_deep - fits > 1:
        middle = (fits + too_deep) // 2
        fits, too_deep = (middle, too_deep) if _fits_recomputed(deep(middle), microbatch) else (fits, middle)
    return deep(fits).model.parameters() / 1e9 if fits else None


def share_of_ideal(job: ClusterJob, microbatch: int) -> float | None:
    """Percent of the speed with unlimited memory; None: there is no plan."""
    try:
        plan = plan_job(job, microbatch)
    except (NoPlan, InvalidValue):
        return None
    return 100 * plan.ideal_seconds / plan.step_seconds


def _fits_recomputed(job: ClusterJob, microbatch: int) -> bool:
    try:
        for last in job.ends:
            problem, budget = problem_of(job, microbatch, placements(job, last)[0])
            every = frozenset(range(len(problem.blocks))) - problem.fixed
            search(replace(problem, always=every), Limits(budget))
    except (NoPlan, InvalidValue):
        return False
    return True
