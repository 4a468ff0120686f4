"""Options of Megatron that conflict with offloading: an error at start that names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ssdtrain.config import ConfigError, Problem
from ssdtrain_megatron import _compat

__all__ = ["check_conflicts", "option_problems", "wrapper_problems"]

_WITHOUT = "leaving it out, or --no-ssdtrain-enabled"

# Option of TransformerConfig, the value that is fine, and why any other is not.
_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    (
        "fine_grained_activation_offloading",
        False,
        "moves the same saved tensors to host memory, and inner saved-tensor hooks win: only one of the two can be on",
    ),
    (
        "cpu_offloading",
        False,
        "lets Transformer Engine move the same saved tensors: only one of the two can be on",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        False,
        "runs the combined 1F1B schedule, which interleaves a forward and a backward layer by layer and has no point "
        "where one microbatch begins; offloading with it is not in this version",
    ),
    (
        "enable_cuda_graph",
        False,
        "replays kernels at fixed addresses, and saved tensors that move would be read where they no longer are",
    ),
    (
        "external_cuda_graph",
        False,
        "replays kernels at fixed addresses, and saved tensors that move would be read where they no longer are",
    ),
    (
        "cuda_graph_impl",
        "none",
        "replays kernels at fixed addresses, and saved tensors that move would be read where they no longer are",
    ),
)

_WRAPPERS = {
    "FullyShardedDataParallel": "Megatron FSDP",
    "MegatronFSDP": "Megatron FSDP",
    "TorchFullyShardedDataParallel": "torch FSDP2",
}


def check_conflicts(chunks: Sequence[nn.Module]) -> None:
    """Check the options of the chunks.

    Raises:
        ConfigError: names every option that conflicts.
    """
    problems = list(dict.fromkeys(problem for chunk in chunks for problem in _problems(chunk)))
    if problems:
        raise ConfigError(problems)


def option_problems(options: Any) -> Iterator[Problem]:
    """The conflicts in a TransformerConfig, or in Megatron-LM's parsed command line."""
    for option, fine, why in _OPTIONS:
        value = getattr(options, option, fine)
        if value not in (fine, None):
            flag = "--" + option.replace("_", "-")
            yield Problem(f"Megatron's {flag}", value, f"together with ssdtrain.offload {why}", _WITHOUT)


def _problems(chunk: nn.Module) -> Iterator[Problem]:
    yield from option_problems(_compat.model_config(chunk))
    why = "frees and gathers parameters behind saved tensors; offloading with it is not in this version"
    yield from wrapper_problems(chunk, why)


def wrapper_problems(chunk: nn.Module, why: str) -> Iterator[Problem]:
    """Wrappers of data parallelism in a chunk that reduce gradients by themselves.

    Args:
        why: the conflict, for the message.
    """
    for module in chunk.modules():
        name = _WRAPPERS.get(type(module).__name__)
        if name is not None:
            yield Problem("Megatron's data parallelism", name, why, "DistributedDataParallel")
