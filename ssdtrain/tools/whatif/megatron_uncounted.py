"""Options of a command line that change what a job takes and that the planner's model does not have: named, not guessed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ssdtrain.config import Config

__all__ = ["add_uncounted_flags", "is_uneven", "uncounted_flags", "uncounted_keys"]

_STAYS = "SSDTrain does not offload beside it"
_BLOCKS = "blocks are counted as those of the other layers"
_TOKENS = "experts are counted with as many tokens each"
_UNEVEN = "layers are counted as spread evenly"
_STATE = "model state is counted as that of Adam on the device"
_SHARDED = f"model state is counted as without it, and {_STAYS}"

_FLAGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "--recompute-granularity": ("which blocks are recomputed is the plan's choice", ()),
    "--recompute-activations": ("what it recomputes is not", ()),
    "--checkpoint-activations": ("which blocks are recomputed is the plan's choice", ()),
    "--moe-layer-recompute": ("what it recomputes is not", ()),
    "--distribute-saved-activations": ("inputs of blocks are counted whole on each rank", ()),
    "--multi-latent-attention": ("attention is counted with keys and values for each head", ()),
    "--experimental-attention-variant": ("attention is counted in full", ()),
    "--linear-attention-freq": ("attention is counted in full", ()),
    "--mtp-num-layers": ("layers that predict further tokens are not", ("0",)),
    "--qk-layernorm": ("what norms of queries and keys save is not", ()),
    "--qk-l2-norm": ("what norms of queries and keys save is not", ()),
    "--attention-output-gate": ("what the gate saves is not", ()),
    "--enable-mhc-connections": ("one residual stream is counted", ()),
    "--fp8-format": ("tensors are counted in 16 bits", ("none",)),
    "--fp4-format": ("tensors are counted in 16 bits", ("none",)),
    "--activation-func-fp8-input-store": ("tensors are counted in 16 bits", ()),
    "--fp32-residual-connection": ("tensors are counted in 16 bits", ()),
    "--fp16-lm-cross-entropy": ("the loss is counted in 32 bits", ()),
    "--memory-efficient-layer-norm": ("norms are counted with their inputs", ()),
    "--no-masked-softmax-fusion": ("softmax is counted as one kernel", ()),
    "--moe-layer-freq": ("every layer is counted with experts", ("1",)),
    "--moe-shared-expert-intermediate-size": ("shared experts are not", ("0",)),
    "--moe-latent-size": ("experts are counted at the width of the model", ()),
    "--moe-expert-capacity-factor": (_TOKENS, ()),
    "--moe-expert-rank-capacity-factor": (_TOKENS, ()),
    "--moe-paged-stash": (_STAYS, ()),
    "--heterogeneous-layers-config-path": (_BLOCKS, ()),
    "--heterogeneous-layers-config-encoded-json": (_BLOCKS, ()),
    "--use-legacy-models": (_BLOCKS, ()),
    "--decoder-first-pipeline-num-layers": (_UNEVEN, ()),
    "--decoder-last-pipeline-num-layers": (_UNEVEN, ()),
    "--pipeline-model-parallel-layout": (_UNEVEN, ()),
    "--pipeline-model-parallel-split-rank": (_UNEVEN, ()),
    "--encoder-pipeline-model-parallel-size": (_UNEVEN, ("0",)),
    "--encoder-tensor-model-parallel-size": ("the encoder is counted as split as the decoder is", ("0",)),
    "--account-for-embedding-in-pipeline-split": (_UNEVEN, ()),
    "--account-for-loss-in-pipeline-split": (_UNEVEN, ()),
    "--optimizer": (_STATE, ("adam",)),
    "--optimizer-cpu-offload": (_STATE, ()),
    "--use-precision-aware-optimizer": (_STATE, ()),
    "--num-distributed-optimizer-instances": (
        "optimizer state is counted as split over all replicas",
        ("1",),
    ),
    "--freeze-all-layers": ("all parameters are counted as trained", ()),
    "--use-megatron-fsdp": (_SHARDED, ()),
    "--use-custom-fsdp": (_SHARDED, ()),
    "--use-torch-fsdp2": (_SHARDED, ()),
    "--cpu-offloading-num-layers": (_STAYS, ("0",)),
    "--fine-grained-activation-offloading": (_STAYS, ()),
    "--overlap-moe-expert-parallel-comm": (_STAYS, ()),
    "--enable-cuda-graph": (_STAYS, ()),
    "--external-cuda-graph": (_STAYS, ()),
    "--cuda-graph-impl": (_STAYS, ("none",)),
}
"""What is counted in an option's place, and its values that change nothing."""

_KEYS = {
    "compact": "linear layers are counted with whole inputs",
    "offload.codec": "tensors are counted as written without it",
    "offload.amount": "how much is offloaded is the plan's choice",
    "offload.device_budget": "how much is offloaded is the plan's choice",
    "offload.include": "which blocks are offloaded is the plan's choice",
    "offload.exclude": "which blocks are offloaded is the plan's choice",
    "plan.device_limit": "the limit is the memory of the GPU",
    "plan.objective": "the plan is the fastest one",
    "plan.max_slowdown": "the plan is the fastest one",
    "plan.compress": "linear layers are counted with whole inputs",
    "plan.encode": "what stays is counted as it is",
}
"""The same of our own config."""


def add_uncounted_flags(parser: argparse.ArgumentParser) -> None:
    for flag in _FLAGS:
        # Some take a value in one version of Megatron-LM and none in another.
        parser.add_argument(flag, nargs="?", const="", metavar="VALUE")


def uncounted_flags(args: argparse.Namespace) -> Iterator[str]:
    """Yield the options that are given with a value that changes something, each with what is counted in its place."""
    for flag, value in _given(args):
        yield f"{flag} {value}".rstrip() + f" ({_FLAGS[flag][0]})"
    if args.context_parallel_size > 1:
        yield f"--context-parallel-size {args.context_parallel_size} (a sequence is counted whole on each rank)"
    if args.expert_tensor_parallel_size not in (None, args.tensor_model_parallel_size):
        yield f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} (experts are split as other layers are)"


def is_uneven(args: argparse.Namespace) -> bool:
    """Whether pipeline ranks may have different numbers of layers."""
    return any(_FLAGS[flag][0] == _UNEVEN for flag, _ in _given(args))


def _given(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for flag, (_, fine) in _FLAGS.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        without = flag.startswith("--moe-") and not args.num_experts
        if value is not None and value not in fine and not without:
            yield flag, value


def uncounted_keys(config: Config | None) -> Iterator[str]:
    """The keys of a config that are not at their default, in the same way."""
    for key, why in _KEYS.items():
        section, _, name = key.partition(".")
        found = getattr(config, section) if config is not None and config.enabled else None
        if found is None:
            continue
        field = type(found).model_fields.get(name)
        given = field is None or (
            name in found.model_fields_set and getattr(found, name) != field.get_default()
        )
        if given:
            yield f"ssdtrain.{key} ({why})"
