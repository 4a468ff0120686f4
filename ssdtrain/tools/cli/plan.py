"""`ssdtrain plan`: the largest microbatch, step time, SSD bandwidth and life of a training job, before it is started anywhere.

    ssdtrain plan --model gpt --hidden 12288 --layers 96 --seq 2048 --tp 8 --pp 8 --gpu h100 --ssd "4 x 7GB/s"

What is assumed is in docs/planner.md.
"""

import argparse
import json
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import parse_size
from ssdtrain.planner.plans import Limits, NoPlan, Objective
from ssdtrain.text import YEAR_SECONDS, duration_text, size_text
from ssdtrain.tools.cli.options import add_machine, command_parser, given, number, rate, whole
from ssdtrain.tools.cli.progress import progress
from ssdtrain.tools.whatif.apply import apply_to_file, launch_flags
from ssdtrain.tools.whatif.cluster import BRIEF, best_plan, plan_job, replanned
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan
from ssdtrain.tools.whatif.explain import figures, rows, with_more
from ssdtrain.tools.whatif.gain import Gain, gain_of
from ssdtrain.tools.whatif.hardware import parse_ssds
from ssdtrain.tools.whatif.layouts import choose_layout
from ssdtrain.tools.whatif.models import FAMILIES, ParallelLayout, Transformer
from ssdtrain.tools.whatif.prices import Prices

USUAL_DRIVE = "3.84TB, 1 DWPD"
USUAL_ENDURANCE = parse_ssds(f"1 x 7GB/s, {USUAL_DRIVE}").endurance
"""Bytes that a drive takes in its life, where the endurance of those of the job is not known."""

MOST_LAYERS = 1000
"""Each block is simulated by itself: so many take about half a minute."""


def run(arguments: list[str]) -> int:
    """Returns the exit status: 0; 1 if no plan fits; 2 for an invalid option."""
    chosen = parser().parse_args(arguments)
    try:
        with progress("planning") as note:
            job, prices, layout = job_of(chosen), prices_of(chosen), None
            if chosen.gpus is not None:
                note("layouts")
                one = 1 if chosen.apply else None  # of a DeepSpeed config data parallelism alone can be said
                tp, pp = chosen.tp or one, chosen.pp or one
                sizes = {"tp": tp, "pp": pp, "dp": chosen.dp, "zero": chosen.zero}
                layout = choose_layout(job, chosen.gpus, microbatch=chosen.microbatch or None, **sizes)
                job = layout.job
            goal = goal_of(chosen, job, prices)
            if chosen.microbatch:
                plan, largest = plan_job(job, chosen.microbatch, *goal), None
            elif chosen.objective == "cost" and prices is not None:
                plan, largest = best_plan(job, *goal, prices.tokens_per_dollar)
            elif chosen.objective == "microbatch":
                plan, largest = best_plan(job, *goal, attrgetter("microbatch"))
            else:
                plan, largest = best_plan(job, *goal)
            note("what more memory and faster drives would bring")
            better = [] if chosen.no_alternatives else list(alternatives(plan, goal))
            costs = {} if prices is None else prices.figures(plan)
            note("what is gained")
            gain = gain_of(job)
        flags = launch_flags(plan, chosen.directory) if chosen.print_flags else []
        if chosen.apply is not None:
            apply_to_file(plan, chosen.apply, chosen.directory)
    except (InvalidValue, NoPlan) as error:
        what = "the job " if isinstance(error, InvalidValue) else ""
        print(f"ssdtrain plan: {what}{error}", file=sys.stderr)
        return 1
    if chosen.print_flags:
        print(" ".join(flags))
    elif chosen.json:
        answer = {**figures(plan, largest), **costs, "alternatives": better, "gain": gain.figures()}
        print(json.dumps(answer if layout is None else {**answer, "chosen_layout": layout.sentence()}))
    else:
        if layout is not None:
            print(f"layout: {layout.sentence()}")
        show(plan, largest, better, costs, gain, Console())
    return 0


NO_DRIVES = "no drives"

NOTHING = 0.005
"""Part of the speed up to which drives bring nothing."""

PlanQuestion = tuple[Limits | None, Objective | None, float | None]
"""Objective, as `plan_job` takes it."""


def prices_of(chosen: Any) -> Prices | None:
    """None: none are given.

    Raises:
        InvalidValue: an option needs them.
    """
    if chosen.drive_price and chosen.ssd is None:
        raise InvalidValue("has a price of drives (--drive-price) and no drives", "--ssd beside it")
    if chosen.gpu_hour is not None:
        return Prices(chosen.gpu_hour, chosen.drive_price)
    if chosen.objective == "cost" or chosen.drive_price:
        raise InvalidValue("has no price of a GPU's hour", "--gpu-hour, such as --gpu-hour 2.5")
    return None


def goal_of(chosen: Any, job: ClusterJob, prices: Prices | None) -> PlanQuestion:
    if chosen.objective == "memory":
        return None, Objective(0, 1), 0.02 if chosen.max_slowdown is None else chosen.max_slowdown
    if chosen.objective == "cost" and prices is not None:
        return None, prices.objective(job), chosen.max_slowdown
    return None, None, chosen.max_slowdown


def parser() -> argparse.ArgumentParser:
    made = command_parser("plan", __doc__)
    model = made.add_argument_group("model")
    model.add_argument("--model", choices=FAMILIES, required=True, help="family of transformers")
    model.add_argument("--hidden", type=whole(), required=True, help="width")
    model.add_argument(
        "--layers",
        type=whole(f"a whole number from 1 to {MOST_LAYERS}", most=MOST_LAYERS),
        required=True,
        help="blocks (t5: of the encoder, and as many of the decoder)",
    )
    model.add_argument("--seq", type=whole(), required=True, help="tokens of a sequence")
    model.add_argument(
        "--heads", type=whole(), help="attention heads; default: of 128, or of 64 below hidden 2048"
    )
    model.add_argument("--kv-heads", type=whole(), help="heads of keys and values; default: as many as heads")
    model.add_argument("--ffn", type=whole(), help="width of the MLP; default: the family's")
    model.add_argument("--vocab", type=whole(), help="words; default: the family's")
    model.add_argument("--experts", type=whole(), help="of a mixture; default: 8 for mixtral")
    model.add_argument("--top-k", type=whole(), help="experts that a token passes; default: 2 for mixtral")
    model.add_argument(
        "--unfused",
        action="store_true",
        help="not one kernel for a gated activation: it saves the output of silu too",
    )
    layout = made.add_argument_group("parallelism")
    layout.add_argument(
        "--gpus",
        type=whole(),
        help="number of GPUs: the fastest layout on them is chosen, with those of --tp, --pp, --dp and --zero that are given",
    )
    layout.add_argument("--tp", type=whole(), help="tensor-parallel ranks; default: 1")
    layout.add_argument("--pp", type=whole(), help="pipeline stages; default: 1")
    layout.add_argument("--dp", type=whole(), help="data-parallel ranks; default: 1")
    layout.add_argument(
        "--virtual", type=whole(), default=1, help="model chunks per pipeline rank (interleaved)"
    )
    layout.add_argument(
        "--expert-parallel", type=whole(), default=1, help="ranks that experts are spread over"
    )
    layout.add_argument(
        "--sequence-parallel", action="store_true", help="split norms over tensor-parallel ranks"
    )
    layout.add_argument("--zero", type=int, choices=range(4), help="stage of ZeRO; default: 0")
    layout.add_argument(
        "--batch",
        type=whole(),
        default=0,
        help="sequences a step; default: 4 microbatches per pipeline stage, with --gpus about 4 million tokens",
    )
    layout.add_argument(
        "--microbatch",
        type=whole(),
        default=0,
        help="sequences; default: the one with the most tokens a second",
    )
    machine = made.add_argument_group("machine")
    add_machine(machine, 8)
    machine.add_argument(
        "--host",
        type=given(parse_size),
        default=0,
        help="host memory of a node for activations and model state; default: none",
    )
    machine.add_argument(
        "--state",
        choices=("device", "host", "ssd"),
        default="device",
        help="where parameters, gradients and optimizer state are held; with host and ssd, blocks of them pass through the "
        "device. Default: device",
    )
    machine.add_argument(
        "--cpu-optimizer",
        type=rate,
        default=0.0,
        help="the CPUs run the optimizer of these blocks, at this memory bandwidth of a node, such as 200GB/s; default: the "
        "device runs it",
    )
    machine.add_argument(
        "--network", type=rate, default=50e9, help="bandwidth of each GPU to other nodes; default: 400Gbit/s"
    )
    machine.add_argument(
        "--gradient-bytes",
        type=whole("bytes, such as 2 or 4", zero=True),
        default=2,
        help="per parameter; 4 where they are accumulated in float32. Default: 2",
    )
    machine.add_argument(
        "--optimizer-bytes",
        type=whole("bytes, such as 12, or 0 where the device holds none", zero=True),
        default=12,
        help="per parameter; default: 12 (mixed precision and Adam)",
    )
    machine.add_argument("--no-recompute", action="store_true", help="never recompute a block")
    goal = made.add_argument_group("goal")
    goal.add_argument(
        "--objective",
        choices=("speed", "microbatch", "memory", "cost"),
        default="speed",
        help="the most tokens a second, the largest microbatch, the least memory within --max-slowdown, or the fewest dollars a "
        "token. Default: speed",
    )
    goal.add_argument(
        "--max-slowdown",
        type=number("0 or more, such as 0.05 for 5%"),
        help="how much longer a microbatch may take than with everything kept in memory (with --state: in the fastest placement "
        "that leaves room), such as 0.05; "
        "default: 0.02 with --objective memory, else no limit",
    )
    goal.add_argument(
        "--gpu-hour",
        type=number("dollars above 0, such as 2.5", zero=False),
        help="dollars of a GPU and its part of the node, an hour",
    )
    goal.add_argument(
        "--drive-price",
        type=number("dollars of one drive, such as 400, or 0 where writes cost nothing"),
        default=0.0,
        help="dollars of a drive, used up by its endurance; default: 0",
    )
    made.add_argument(
        "--no-alternatives",
        action="store_true",
        help="do not predict what more memory or faster drives would bring",
    )
    made.add_argument(
        "--apply",
        type=Path,
        metavar="DS.JSON",
        help="write the place of model state into this DeepSpeed config, with the batch where one is asked for or it has none",
    )
    made.add_argument(
        "--print-flags", action="store_true", help="print Megatron-LM's flags for the plan, and nothing else"
    )
    made.add_argument("--directory", help="on the drives, for --apply and --print-flags where they need one")
    return made


def job_of(chosen: Any) -> ClusterJob:
    model = Transformer.of(
        chosen.model,
        hidden=chosen.hidden,
        layers=chosen.layers,
        sequence=chosen.seq,
        heads=chosen.heads,
        kv_heads=chosen.kv_heads,
        ffn=chosen.ffn,
        vocabulary=chosen.vocab,
        experts=chosen.experts,
        top_k=chosen.top_k,
        fused=not chosen.unfused,
    )
    layout = ParallelLayout(
        chosen.tp or 1,
        chosen.pp or 1,
        chosen.dp or (chosen.expert_parallel if chosen.gpus else 1),
        chosen.virtual,
        chosen.sequence_parallel,
        chosen.zero or 0,
        chosen.expert_parallel,
    )
    return ClusterJob(
        model,
        layout,
        chosen.gpu,
        chosen.ssd,
        host=chosen.host,
        batch=chosen.batch,
        network=chosen.network,
        node=chosen.gpus_per_node,
        reserve=chosen.reserve,
        efficiency=chosen.efficiency,
        gradient=chosen.gradient_bytes,
        optimizer=chosen.optimizer_bytes,
        recompute=not chosen.no_recompute,
        state=chosen.state,
        cpu_rate=chosen.cpu_optimizer,
    )


def alternatives(
    plan: ClusterPlan, goal: PlanQuestion = (None, None, None), others: dict[str, ClusterJob] | None = None
) -> list[dict[str, Any]]:
    """What one thing better would bring at the same microbatch, with model state in the same place; and without any drive, where
    it is not on them. `others` are more such jobs."""
    jobs = with_more(plan.job)
    if plan.job.ssds is not None and plan.job.state != "ssd":
        jobs[NO_DRIVES] = replace(plan.job, ssds=None)
    jobs |= others or {}
    found = []
    for name, job in jobs.items():
        try:
            seconds: float | None = replanned(plan, job, *goal[:2], BRIEF).step_seconds
        except (NoPlan, InvalidValue):
            seconds = None
        speedup = plan.step_seconds / seconds if seconds else None
        found.append({"what": name, "step_seconds": seconds, "speedup": speedup})
    return found


def show(
    plan: ClusterPlan,
    largest: int | None,
    better: list[dict[str, Any]],
    costs: dict[str, float],
    gain: Gain,
    console: Console,
) -> None:
    """Prints what is gained, and the plan as tables."""
    console.print(f"gain: {gain.sentence()}", highlight=False, soft_wrap=True)
    job, found = plan.job, figures(plan, largest)
    if job.layout.tp > job.node:
        nodes = -(-job.layout.tp // job.node)
        console.print(
            f"note: the {job.layout.tp} tensor-parallel ranks are on {nodes} nodes of {job.node} GPUs: their all-reduces go over "
            "the network, and computation waits for them",
            highlight=False,
            soft_wrap=True,
        )
    parameters = f"{found['parameters'] / 1e9:.3g}B parameters"
    title = f"{job.model.family}, {parameters} on {job.layout.ranks} x {job.gpu.name}"
    table = Table("figure", Column("predicted", justify="right"), title=title)
    for name, value in summary(plan, found):
        table.add_row(name, value)
    for key, cost in costs.items():
        table.add_row(key.replace("_", " "), f"{cost:.4g}")
    console.print(table)
    for stage in plan.stages:
        which = "only stage" if job.layout.pp == 1 else "last stage" if stage.last else "first stage"
        used = f"{size_text(stage.plan.peak)} of {size_text(stage.budget)}"
        # Not the table's title, which is wrapped to the width of the table.
        console.print(
            f"{which}: microbatches alive at once: {stage.alive}, activations {used}", highlight=False
        )
        table = Table("blocks", "action", "saved by each", "why")
        for row in rows(stage):
            table.add_row(row.blocks, row.action, size_text(row.saved), row.reason)
        console.print(table)
        for other in stage.plans[1:]:
            slower = stage.seconds(other) / stage.seconds(stage.plan)
            console.print(f"  next best: {other.summary()}: x{slower:.3f} time, {size_text(other.peak)}")
    for entry in better:
        faster = "no plan fits" if entry["speedup"] is None else f"x{entry['speedup']:.3f} steps per second"
        if entry["what"] == NO_DRIVES and entry["speedup"] and entry["speedup"] > 1 - NOTHING:
            faster += ": at this microbatch the drives bring nothing"
        console.print(f"  with {entry['what']}: {faster}")


def summary(plan: ClusterPlan, found: dict[str, Any]) -> list[tuple[str, str]]:
    state = sum(plan.stages[0].state.values())
    sequences = plan.microbatch * plan.microbatches * plan.job.layout.dp
    lines = [
        ("microbatch", f"{plan.microbatch} x {plan.microbatches} a step"),
        (
            "sequences a step" if plan.job.batch else "sequences a step (to compare plans, --batch)",
            str(sequences),
        ),
    ]
    if found["largest_microbatch"] is not None:
        lines.append(("largest microbatch that fits", str(found["largest_microbatch"])))
    lines += [
        ("step time", duration_text(plan.step_seconds)),
        ("pipeline bubble", f"{duration_text(plan.bubble_seconds)} ({found['bubble_share']:.1%})"),
        ("part of the speed with unlimited memory", f"{found['share_of_ideal']:.1%}"),
        ("tokens per second", f"{plan.tokens_per_second:.4g}"),
        ("model TFLOP/s per GPU", f"{found['tflops_per_gpu']:.0f}"),
        ("model state per GPU", size_text(state)),
    ]
    if plan.job.state != "device":
        where = {"host": "host memory", "ssd": "SSD"}[plan.job.state]
        away = max(stage.placement.away for stage in plan.stages) * plan.job.local_node
        lines += [
            (f"model state in {where} per node", size_text(away)),
            ("blocks whose state stays on the device", str(plan.stages[0].placement.persistent)),
            ("wait for the optimizer", duration_text(plan.update_seconds[1])),
        ]
    for_all = f"{found['ssd_bandwidth_for_all'] / 1e9:.2f} GB/s"
    if plan.job.ssds is None:
        return [*lines, ("bandwidth per GPU to offload everything", for_all)]
    share = plan.job.ssds.write_rate / plan.job.local_node
    lines += [
        (
            "SSD write bandwidth needed per GPU",
            f"{found['ssd_bandwidth_needed'] / 1e9:.2f} GB/s of {share / 1e9:.2f}",
        ),
        ("the same if everything were offloaded", for_all),
        ("written to SSD per GPU and step", size_text(found["ssd_bytes_per_step"])),
        ("written to each drive in a year", f"{found['ssd_bytes_per_drive_and_year'] / 1e15:.2f} PB"),
    ]
    life = plan.life_seconds()
    if life is not None:
        lines.append(("life of the drives", f"{life / YEAR_SECONDS:.1f} years"))
    elif found["ssd_bytes_per_step"]:
        years = USUAL_ENDURANCE / found["ssd_bytes_per_drive_and_year"]
        lines.append((f"life of the drives, if of {USUAL_DRIVE}", duration_text(years * YEAR_SECONDS)))
    return lines
