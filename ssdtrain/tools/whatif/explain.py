"""The plan of a cluster job as rows and figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, NamedTuple

from ssdtrain.planner.model.types import DEVICE, Block
from ssdtrain.planner.planned_state import PlannedState
from ssdtrain.text import YEAR_SECONDS, duration_text
from ssdtrain.tools.whatif.cluster_job import HEAD, ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan, Stage


class TableRow(NamedTuple):
    """Blocks that follow each other and are treated alike."""

    blocks: str
    """Such as "block 0 to 11"."""
    action: str
    saved: int
    """Bytes that one of them saves in a microbatch."""
    stall: float
    """Seconds that they make computation wait, per microbatch."""
    reason: str


def rows(stage: Stage) -> Iterator[TableRow]:
    """The plan of a stage, block by block, blocks alike in one row."""
    blocks = stage.problem.blocks
    times = [each for chunk in stage.plan.timeline.blocks for each in chunk]
    numbered = zip(range(len(blocks)), stage.plan.actions, strict=True)
    for (action, saved), group in groupby(numbered, key=lambda entry: (entry[1], blocks[entry[0]].saved)):
        places = [number for number, _ in group]
        first, last = blocks[places[0]].name, blocks[places[-1]].name
        stall = sum(times[n].store_stall + times[n].load_stall for n in places) / stage.simulated
        name = first if first == last else f"{first} to {last.rpartition(' ')[2]}"
        reason = _reason(stage, blocks[places[0]], action, stall, len(places))
        stay = sum(not times[n].stored for n in places)
        if stay and stage.problem.choice(action).tier != DEVICE:
            reason += f"; {stay} of {len(places)} are needed again before their writes begin, and stay"
        yield TableRow(name, action, saved, stall, reason)


def with_more(job: ClusterJob) -> dict[str, ClusterJob]:
    """The same job with one thing better, by what it is."""
    found = {"1 GB more device memory": replace(job, gpu=replace(job.gpu, memory=job.gpu.memory + 10**9))}
    if job.ssds is not None:
        found["drives twice as fast"] = replace(job, ssds=job.ssds.faster(2))
    if job.layout.dp > 1 or job.layout.tp > job.node:
        found["network twice as fast"] = replace(job, network=2 * job.network)
    return found


def _reason(stage: Stage, block: Block, action: str, stall: float, count: int) -> str:
    """Why `count` blocks like this one, which make computation wait for `stall` seconds together, have an action."""
    if action == "keep":
        if block.name == HEAD:
            return "its backward follows at once"
        if set(stage.plan.actions) == {"keep"}:
            return "everything fits"
        return "there is room for it, at no cost"
    if action == "recompute":
        tiers = stage.problem.machine.tiers
        if not tiers:
            return (
                f"running it again takes {duration_text(block.recompute)}; there is no drive or host memory"
            )
        fastest = max(tiers, key=lambda tier: tier.write)
        return (
            f"running it again takes {duration_text(block.recompute)}, writing it to {fastest.name} "
            f"{duration_text(block.saved / fastest.write)} of bandwidth that others use"
        )
    choice = stage.problem.choice(action)
    tier = next((tier for tier in stage.problem.machine.tiers if tier.name == choice.tier), None)
    if tier is None:
        return "its codec takes less time than running it again"
    moving = duration_text(choice.share * count * block.saved / tier.write)
    whole = "it" if count == 1 else f"these {count}"
    what = whole if choice.share == 1 else f"{choice.share:.0%} of {whole}"
    writing = f"writing {what} takes {moving}"
    if stall < 1e-6:
        return f"{writing}, hidden behind computation"
    # These may be waits behind transfers of other blocks, and for reads: more than the writes themselves take.
    return f"{writing}; computation waits {duration_text(stall)} for their transfers and those before them"


def figures(plan: ClusterPlan, largest: int | None = None) -> dict[str, Any]:
    """Everything about a plan that JSON can hold. Seconds and bytes; rates per second."""
    job, life = plan.job, plan.life_seconds()
    steps_a_year = YEAR_SECONDS / plan.step_seconds
    drives = job.ssds.count if job.ssds is not None else 0
    reducing, updating = plan.update_seconds
    return {
        "model": asdict(job.model),
        "layout": asdict(job.layout),
        "gpu": job.gpu.name,
        "gpus": job.layout.ranks,
        "parameters": job.model.parameters(),
        "microbatch": plan.microbatch,
        "largest_microbatch": largest,
        "microbatches": plan.microbatches,
        "step_seconds": plan.step_seconds,
        "share_of_ideal": plan.ideal_seconds / plan.step_seconds,
        "bubble_seconds": plan.bubble_seconds,
        "bubble_share": plan.bubble_seconds / plan.step_seconds,
        "reduction_seconds": reducing,
        "sharding_seconds": job.sharding_seconds * plan.microbatches,
        "optimizer_seconds": updating,
        "tokens_per_second": plan.tokens_per_second,
        "tflops_per_gpu": plan.flops_per_gpu / 1e12,
        "ssd_bandwidth_needed": plan.needed_bandwidth(),
        "ssd_bandwidth_for_all": plan.job.bandwidth_for_all(plan.microbatch),
        "ssd_bytes_per_step": plan.written_per_step(),
        "ssd_bytes_per_drive_and_year": plan.written_per_step() * job.local_node * steps_a_year / drives
        if drives
        else 0.0,
        "ssd_life_years": life / YEAR_SECONDS if life is not None else None,
        "state": planned_state(plan).to_dict(),
        "stages": [_stage_figures(stage) for stage in plan.stages],
    }


def planned_state(plan: ClusterPlan) -> PlannedState:
    """Where a plan has model state, as frameworks are told; of a pipeline that of the first stage."""
    job, stage = plan.job, plan.stages[0]
    kinds = job.stage_kinds(stage.last)
    blocks = [job.block_parameters(kind) for kind in kinds]
    return PlannedState(
        place=job.state,
        zero=job.layout.zero,
        ranks=job.layout.dp,
        blocks=len(kinds),
        persistent=stage.placement.persistent,
        buffers=stage.placement.buffers,
        block_parameters=int(max(blocks)),
        outer_parameters=int(job.rank_parameters(stage.last) - sum(blocks)),
        largest_parameter=job.model.hidden * max(job.model.ffn, job.model.vocabulary) // job.layout.tp,
        cpu_optimizer=bool(job.cpu_rate),
    )


def _stage_figures(stage: Stage) -> dict[str, Any]:
    return {
        "stage": "last" if stage.last else "first",
        "microbatches_alive": stage.alive,
        "model_state_bytes": stage.state,
        "model_state_bytes_away": stage.placement.away,
        "persistent_blocks": stage.placement.persistent,
        "state_buffers": stage.placement.buffers,
        "activation_budget_bytes": stage.budget,
        "activation_peak_bytes": stage.plan.peak,
        "microbatch_seconds": stage.seconds(stage.plan),
        "stall_seconds": stage.plan.timeline.stall / stage.simulated,
        "blocks": [row._asdict() for row in rows(stage)],
        "runners_up": [
            {
                "actions": other.summary(),
                "microbatch_seconds": stage.seconds(other),
                "activation_peak_bytes": other.peak,
                "ssd_bytes": other.written / stage.simulated,
            }
            for other in stage.plans[1:]
        ],
    }
