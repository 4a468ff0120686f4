"""The flags of a Megatron-LM command line that say what a job is, beside those of its launcher and our own."""

from __future__ import annotations

import argparse

from ssdtrain.tools.cli.options import number, whole
from ssdtrain.tools.cli.plan import MOST_LAYERS
from ssdtrain.tools.whatif.megatron_uncounted import add_uncounted_flags
from ssdtrain_megatron.flags import add_arguments

__all__ = ["ALL_GPUS", "parser"]

ALL_GPUS = 0
"""--nproc-per-node: as many ranks as the node has GPUs."""

_LAYERS = ("--num-layers", "--encoder-num-layers", "--decoder-num-layers")
_WHOLE = (
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--kv-channels",
    "--num-query-groups",
    "--seq-length",
    "--encoder-seq-length",
    "--decoder-seq-length",
    "--max-position-embeddings",
    "--vocab-size",
    "--padded-vocab-size",
    "--moe-ffn-hidden-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--micro-batch-size",
    "--global-batch-size",
    "--expert-tensor-parallel-size",
    "--nnodes",
)
_WHOLE_WITH_DEFAULT = {
    "--make-vocab-size-divisible-by": 128,
    "--moe-router-topk": 2,
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1,
}
_SWITCHES = (
    "--group-query-attention",
    "--swiglu",
    "--quick-geglu",
    "--no-bias-swiglu-fusion",
    "--untie-embeddings-and-output-weights",
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--bf16",
    "--fp16",
    "--accumulate-allreduce-grads-in-fp32",
    "--grad-reduce-in-bf16",
)


def parser() -> argparse.ArgumentParser:
    """Parses the flags that are known, by `parse_known_args`."""
    made = argparse.ArgumentParser(
        prog="ssdtrain estimate",
        usage="ssdtrain estimate --gpu GPU [--ssd DRIVES] [LAUNCHER] SCRIPT --num-layers L --hidden-size H ...",
        allow_abbrev=False,
        add_help=False,
    )
    for flag in _LAYERS:
        made.add_argument(flag, type=whole(f"a whole number from 1 to {MOST_LAYERS}", most=MOST_LAYERS))
    for flag in _WHOLE:
        made.add_argument(flag, type=whole())
    for flag, default in _WHOLE_WITH_DEFAULT.items():
        made.add_argument(flag, type=whole(), default=default)
    for flag in _SWITCHES:
        made.add_argument(flag, action="store_true")
    made.add_argument("--num-experts", type=whole("a whole number", zero=True), default=0)
    for flag in ("--hidden-dropout", "--attention-dropout"):
        made.add_argument(flag, type=number("0 to 1, such as 0.1", most=1), default=0.1)
    made.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    made.add_argument("--transformer-impl", default="transformer_engine")
    made.add_argument("--attention-backend", default="auto")
    made.add_argument("--main-grads-dtype", default="fp32")
    made.add_argument("--recompute-modules", nargs="*", default=["core_attn"])
    made.add_argument("--spec", nargs="*", default=[])
    made.add_argument("--yaml-cfg")
    made.add_argument("--nproc-per-node", "--nproc_per_node", type=_ranks)
    add_uncounted_flags(made)
    return add_arguments(made)


def _ranks(text: str) -> int:
    return ALL_GPUS if text in ("gpu", "auto") else whole()(text)
