"""`ssdtrain plan`: the largest microbatch, step time, SSD bandwidth and life of a training job, before it is started anywhere.

    ssdtrain plan --model gpt --hidden 12288 --layers 96 --seq 2048 --tp 8 --pp 8 --gpu h100 --ssd "4 x 7GB/s"

What is assumed is in docs/planner.md.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from ssdtrain.cli.progress import progress
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import GiB, parse_size
from ssdtrain.planner.cluster import ClusterPlan, Job, best_plan, plan_job, with_more
from ssdtrain.planner.explain import figures, rows
from ssdtrain.planner.hardware import GPUS, find_gpu, parse_rate, parse_ssds
from ssdtrain.planner.models import FAMILIES, Layout, Transformer
from ssdtrain.planner.plans import NoPlan
from ssdtrain.telemetry.text import YEAR_SECONDS, duration_text, size_text

T = TypeVar("T")


def run(arguments: list[str]) -> int:
    """0; 1 where no plan fits; 2 where an option cannot be."""
    chosen = parser().parse_args(arguments)
    try:
        with progress("planning") as note:
            job = job_of(chosen)
            if chosen.microbatch:
                plan, largest = plan_job(job, chosen.microbatch), None
            else:
                plan, largest = best_plan(job)
            note("what more memory and faster drives would bring")
            better = [] if chosen.no_alternatives else list(alternatives(plan))
    except InvalidValue as error:
        print(f"ssdtrain plan: the job {error}", file=sys.stderr)
        return 1
    except NoPlan as error:
        print(f"ssdtrain plan: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps({**figures(plan, largest), "alternatives": better}))
    else:
        show(plan, largest, better, Console())
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ssdtrain plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = made.add_argument_group("model")
    model.add_argument("--model", choices=FAMILIES, required=True, help="family of transformers")
    model.add_argument("--hidden", type=int, required=True, help="width")
    model.add_argument(
        "--layers", type=int, required=True, help="blocks (t5: of the encoder, and as many of the decoder)"
    )
    model.add_argument("--seq", type=int, required=True, help="tokens of a sequence")
    model.add_argument(
        "--heads", type=int, help="attention heads; default: of 128, or of 64 below hidden 2048"
    )
    model.add_argument("--kv-heads", type=int, help="heads of keys and values; default: as many as heads")
    model.add_argument("--ffn", type=int, help="width of the MLP; default: the family's")
    model.add_argument("--vocab", type=int, help="words; default: the family's")
    model.add_argument("--experts", type=int, help="of a mixture; default: 8 for mixtral")
    model.add_argument("--top-k", type=int, help="experts that a token passes; default: 2 for mixtral")
    model.add_argument("--unfused", action="store_true", help="a gated activation saves its silu too")
    layout = made.add_argument_group("parallelism")
    layout.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    layout.add_argument("--pp", type=int, default=1, help="pipeline stages")
    layout.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    layout.add_argument("--virtual", type=int, default=1, help="model chunks per pipeline rank (interleaved)")
    layout.add_argument("--expert-parallel", type=int, default=1, help="ranks that experts are spread over")
    layout.add_argument(
        "--sequence-parallel", action="store_true", help="split norms over tensor-parallel ranks"
    )
    layout.add_argument("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO")
    layout.add_argument(
        "--batch", type=int, default=0, help="sequences a step; default: 4 microbatches per pipeline stage"
    )
    layout.add_argument(
        "--microbatch", type=int, default=0, help="sequences; default: the one with the most tokens a second"
    )
    machine = made.add_argument_group("machine")
    machine.add_argument("--gpu", type=given(find_gpu), required=True, help=", ".join(GPUS))
    machine.add_argument(
        "--ssd",
        type=given(parse_ssds),
        help='of a node: "4 x 7GB/s", "2 x 7GB/s, write 5GB/s, 3.84TB, 1 DWPD"',
    )
    machine.add_argument(
        "--host",
        type=given(parse_size),
        default=0,
        help="host memory of a node for activations; default: none",
    )
    machine.add_argument("--gpus-per-node", type=int, default=8, help="which share drives and host memory")
    machine.add_argument(
        "--network", type=given(parse_rate), default=50e9, help="of a GPU to other nodes; default: 400Gbit/s"
    )
    machine.add_argument(
        "--reserve", type=given(parse_size), default=4 * GiB, help="device memory for all else; default: 4GiB"
    )
    machine.add_argument(
        "--efficiency", type=float, default=0.5, help="part of the peak FLOP rate; default: 0.5"
    )
    machine.add_argument(
        "--gradient-bytes",
        type=int,
        default=2,
        help="per parameter; 4 where they are accumulated in float32. Default: 2",
    )
    machine.add_argument(
        "--optimizer-bytes",
        type=int,
        default=12,
        help="per parameter; default: 12 (mixed precision and Adam)",
    )
    machine.add_argument("--no-recompute", action="store_true", help="never recompute a block")
    made.add_argument(
        "--no-alternatives",
        action="store_true",
        help="do not predict what more memory or faster drives would bring",
    )
    made.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return made


def given(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argparse type: an InvalidValue becomes an error of usage."""

    def converted(text: str) -> T:
        try:
            return parse(text)
        except InvalidValue as error:
            raise argparse.ArgumentTypeError(f'"{text}" {error}') from None

    return converted


def job_of(chosen: Any) -> Job:
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
    layout = Layout(
        chosen.tp,
        chosen.pp,
        chosen.dp,
        chosen.virtual,
        chosen.sequence_parallel,
        chosen.zero,
        chosen.expert_parallel,
    )
    return Job(
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
    )


def alternatives(plan: ClusterPlan) -> list[dict[str, Any]]:
    """What one thing better would bring at the same microbatch; and without any drive."""
    jobs = with_more(plan.job)
    if plan.job.ssds is not None:
        jobs["no drives"] = replace(plan.job, ssds=None)
    found = []
    for name, job in jobs.items():
        try:
            seconds: float | None = plan_job(job, plan.microbatch).step_seconds
        except (NoPlan, InvalidValue):
            seconds = None
        found.append(
            {
                "what": name,
                "step_seconds": seconds,
                "speedup": plan.step_seconds / seconds if seconds else None,
            }
        )
    return found


def show(plan: ClusterPlan, largest: int | None, better: list[dict[str, Any]], console: Console) -> None:
    """Prints the plan as tables."""
    job, found = plan.job, figures(plan, largest)
    table = Table(
        title=f"{job.model.family}, {found['parameters'] / 1e9:.3g}B parameters on {job.layout.ranks} x {job.gpu.name}"
    )
    table.add_column("figure")
    table.add_column("predicted", justify="right")
    for name, value in summary(plan, found):
        table.add_row(name, value)
    console.print(table)
    for stage in plan.stages:
        which = "only stage" if job.layout.pp == 1 else "last stage" if stage.last else "first stage"
        used = f"{size_text(stage.plan.peak)} of {size_text(stage.budget)}"
        title = f"{which}: {stage.alive} alive at once, activations {used}"
        table = Table(title=title)
        for column in ("blocks", "action", "saved by each", "why"):
            table.add_column(column)
        for row in rows(stage):
            table.add_row(row.blocks, row.action, size_text(row.saved), row.reason)
        console.print(table)
        for other in stage.plans[1:]:
            slower = stage.seconds(other) / stage.seconds(stage.plan)
            console.print(f"  next best: {other.summary()}: x{slower:.3f} time, {size_text(other.peak)}")
    for entry in better:
        gain = "no plan fits" if entry["speedup"] is None else f"x{entry['speedup']:.3f} steps per second"
        console.print(f"  with {entry['what']}: {gain}")


def summary(plan: ClusterPlan, found: dict[str, Any]) -> list[tuple[str, str]]:
    state = sum(plan.stages[0].state.values())
    lines = [("microbatch", f"{plan.microbatch} x {plan.microbatches} a step")]
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
    if plan.job.ssds is None:
        return lines
    share = plan.job.ssds.write_rate / plan.job.local_node
    lines += [
        (
            "SSD write bandwidth needed per GPU",
            f"{found['ssd_bandwidth_needed'] / 1e9:.2f} GB/s of {share / 1e9:.2f}",
        ),
        ("the same if everything were offloaded", f"{found['ssd_bandwidth_for_all'] / 1e9:.2f} GB/s"),
        ("written to SSD per GPU and step", size_text(found["ssd_bytes_per_step"])),
        ("written to each drive in a year", f"{found['ssd_bytes_per_drive_and_year'] / 1e15:.2f} PB"),
    ]
    life = plan.life_seconds()
    if life is not None:
        lines.append(("life of the drives", f"{life / YEAR_SECONDS:.1f} years"))
    elif found["ssd_bytes_per_step"]:
        lines.append(("life of the drives", 'unknown: name their endurance, as in "3.84TB, 1 DWPD"'))
    return lines
