"""`ssdtrain estimate`: what your own model takes on a GPU, before it is run: no GPU and no memory is needed.

    ssdtrain estimate my_package.model:build --batch 8 --gpu h100 --ssd "4 x 7GB/s"

`build(batch)` returns the model and a function without arguments that runs its forward and returns the loss; what it saves is
counted under fake tensors. In its place the `config.json` of a model of the transformers library may stand, where that is
installed:

    ssdtrain estimate ./llama/config.json --seq 4096 --batch 8 --gpu h100

or the command line of a training script of Megatron-LM, as it is, whose flags say shape, parallelism and batch:

    ssdtrain estimate --gpu h100 --ssd "4 x 7GB/s" torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --num-layers 96 ...
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ssdtrain.text import duration_text, size_text
from ssdtrain.tools.cli import training_command
from ssdtrain.tools.cli.model_source import ON_FAKE_TENSORS, checked, factory, from_config, is_config
from ssdtrain.tools.cli.options import add_machine, command_parser, whole
from ssdtrain.tools.cli.progress import progress
from ssdtrain.tools.whatif import megatron_command
from ssdtrain.tools.whatif.estimate import Estimate, Hardware, estimate


def run(arguments: list[str]) -> int:
    """Returns the exit status: 0; 1 if nothing fits or the model does not exist; 2 for an invalid option."""
    if megatron_command.takes(arguments):
        return training_command.run(arguments)
    chosen = parser().parse_args(arguments)
    hardware = Hardware(
        chosen.gpu, chosen.ssd, chosen.gpus_per_node, chosen.reserve, chosen.state_bytes, chosen.efficiency
    )
    try:
        with progress(f"counting what {chosen.model} saves"):
            named = chosen.model
            build = from_config(Path(named), chosen.seq) if is_config(named) else factory(named)
            found = estimate(checked(build, named), chosen.batch, hardware, patterns=chosen.blocks)
    except ValueError as error:
        print(f"ssdtrain estimate: the model {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(f"ssdtrain estimate: the model's backward failed: {error}; {ON_FAKE_TENSORS}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(figures(found)))
    else:
        show(found, Console(), chosen.ssd is not None)
    return 0 if found.plan is not None else 1


def parser() -> argparse.ArgumentParser:
    made = command_parser("estimate", __doc__)
    made.add_argument(
        "model", help="module:function, file.py:function, the path of a config.json, or a command line"
    )
    made.add_argument(
        "--seq", type=whole(), default=2048, help="tokens of a sequence, for a config.json; default: 2048"
    )
    made.add_argument("--batch", type=whole(), default=1, help="sequences of a microbatch; default: 1")
    made.add_argument(
        "--blocks",
        nargs="*",
        action="extend",
        default=[],
        help="patterns of blocks' names; may be repeated; default: those of the longest ModuleList",
    )
    add_machine(made, 8)
    made.add_argument(
        "--state-bytes",
        type=whole("bytes, such as 16, or fewer where ranks share them", zero=True),
        default=16,
        help="bytes of model state per parameter on this GPU; default: 16 (mixed precision and Adam)",
    )
    return made


def figures(found: Estimate) -> dict[str, Any]:
    """Bytes, seconds, and bytes per second."""
    actions = found.plan.actions if found.plan is not None else ("",) * len(found.blocks)
    names = [
        f"{name} in part" if shares else name for name, _, shares in (one.partition(":") for one in actions)
    ]
    return {
        "batch": found.batch,
        "largest_batch": found.largest,
        "saved_bytes": found.saved,
        "model_state_bytes": found.state,
        "activation_budget_bytes": found.budget,
        "seconds": found.seconds,
        "bandwidth_for_all": found.bandwidth_for_all,
        "planned_seconds": found.plan.seconds if found.plan is not None else None,
        "activation_peak_bytes": found.plan.peak if found.plan is not None else None,
        "gain": found.gain.figures(),
        "blocks": [
            {"name": block.name, "saved_bytes": block.saved, "input_bytes": block.inputs, "action": action}
            for block, action in zip(found.blocks, names, strict=True)
        ],
    }


def show(found: Estimate, console: Console, drives: bool) -> None:
    values = figures(found)
    console.print(f"gain: {found.gain.sentence()}", highlight=False, soft_wrap=True)
    table = Table("block", "saved", "inputs", "forward", "action", title=f"microbatch of {found.batch}")
    for block, row in zip(found.blocks, values["blocks"], strict=True):
        sizes = size_text(block.saved), size_text(block.inputs)
        table.add_row(block.name, *sizes, duration_text(block.forward), row["action"])
    console.print(table)
    console.print(f"saved by a microbatch: {size_text(found.saved)}; model state: {size_text(found.state)}")
    console.print(f"bandwidth needed to offload all of it: {found.bandwidth_for_all / 1e9:.2f} GB/s")
    if found.plan is None:
        console.print(f"no plan fits into {size_text(found.budget)}: {remedy(found, drives)}")
    else:
        console.print(
            f"plan: {found.plan.summary()}; activation peak {size_text(found.plan.peak)} of {size_text(found.budget)}; "
            f"{duration_text(found.plan.seconds)}, with everything kept {duration_text(found.seconds)}"
        )
    console.print(f"largest microbatch: {found.largest}")


def remedy(found: Estimate, drives: bool) -> str:
    """Where nothing fits."""
    more = "more or faster drives" if drives else "drives to offload to (--ssd)"
    smaller = "" if found.batch == 1 else f"a smaller --batch (the largest that fits is {found.largest}), "
    return f"use {smaller}{more}, a larger --gpu, or split the model over more ranks"
