"""The trainer's flags: those of Megatron-LM by name and meaning, and the --ssdtrain-* flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from ssdtrain_megatron.flags import add_arguments

__all__ = ["offload_by_default", "parser"]


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The flags. What Megatron-LM has and this trainer lacks is an error of argparse."""
    made = argparse.ArgumentParser(
        prog=prog, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    _model(made.add_argument_group("model"))
    _parallelism(made.add_argument_group("parallelism"))
    _training(made.add_argument_group("training"))
    return add_arguments(made)


def offload_by_default(options: argparse.Namespace, directory: Path) -> None:
    """Spill all of what is saved to `directory` where the flags name neither a config nor directories. An amount that they give
    stays.
    """
    if options.ssdtrain_config is not None or options.ssdtrain_offload_directories is not None:
        return
    options.ssdtrain_offload_directories = [str(directory)]
    if options.ssdtrain_offload_amount is None:
        options.ssdtrain_offload_amount = "all"


def _model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-layers", type=int, default=8)
    add("--hidden-size", type=int, default=256)
    add("--num-attention-heads", type=int, default=8)
    add("--seq-length", type=int, default=256)
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    add("--bf16", action="store_true")


def _parallelism(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add("--num-virtual-stages-per-pipeline-rank", type=int, default=None)
    add("--sequence-parallel", action="store_true")
    add("--num-experts", type=int, default=None)
    add("--expert-model-parallel-size", type=int, default=1)
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true")
    add("--distributed-backend", choices=("nccl", "gloo"), default="nccl")


def _training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--micro-batch-size", type=int, default=4, help="sequences in a microbatch")
    add("--global-batch-size", type=int, default=16, help="sequences in a step, on all data-parallel ranks")
    add("--train-iters", type=int, default=20)
    add("--lr", type=float, default=1e-3)
    add("--clip-grad", type=float, default=1.0)
    add("--seed", type=int, default=1234)
    add("--log-interval", type=int, default=5)
    add("--data-path", help="prefix of Megatron's .bin and .idx; else the Python standard library's sources")
    add(
        "--data-cache-path",
        default="out/demo-megatron/data",
        help="where that text and its indices are built",
    )
    add("--recompute-granularity", choices=("full", "selective"))
    add("--recompute-method", choices=("uniform", "block"))
    add("--recompute-num-layers", type=int)
