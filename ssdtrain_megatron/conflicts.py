"""Options of Megatron that conflict with a section of ours: an error at start that names them. The table in docs/megatron.md is
generated from this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from ssdtrain.comm import Policy
from ssdtrain.config import DIMENSIONS, Config, ConfigError, ConfigIssue
from ssdtrain.integration.compatibility import FrameworkConflict, conflicts
from ssdtrain_megatron import _compat, _compat_comm


def _row(
    option: str,
    section: Literal["offload", "comm"],
    why: str,
    dimensions: Sequence[str] = (),
    fine: Sequence[Any] = (False,),
) -> FrameworkConflict:
    """A row of `MEGATRON_CONFLICTS`.

    Args:
        dimensions: of `comm` that the option concerns; empty: all.
        fine: the values that do not conflict.
    """

    def applies(value: Any, config: Config, options: Mapping[str, Any]) -> bool:
        if value in (*fine, None):
            return False
        return section != "comm" or bool(_compressed(config, dimensions or DIMENSIONS))

    instead = ", ".join(f'"{name}": "off"' for name in dimensions) + " in" if dimensions else "no"
    remedy = f"leaving it out, or {instead} ssdtrain.{section}"
    return FrameworkConflict(option, section, "error", why, remedy, applies)


def _compressed(config: Config, dimensions: Sequence[str]) -> list[str]:
    if config.comm is None or not config.compresses:
        return []
    rules = Policy.from_config(config.comm).rules
    return [name for name in dimensions if not rules[name].off]


_GRADIENTS_AND_WEIGHTS = ("dp", "dp_gather", "zero_gather")
_ONE_ONLY = "only one of the two can be on"
_ADDRESSES = (
    "replays kernels at fixed addresses, and saved tensors that move would be read where they no longer are"
)
_REPLAYED = "replays collectives from a CUDA graph, which a codec that sizes its messages cannot be in"
_COMBINED = (
    "runs the combined 1F1B schedule, which interleaves a forward and a backward layer by layer and has no point where one "
    "microbatch begins; offloading with it is not in this version"
)
_DISPATCHERS = ("allgather", "alltoall", "alltoall_seq")

MEGATRON_CONFLICTS: tuple[FrameworkConflict, ...] = (
    _row(
        "fine_grained_activation_offloading",
        "offload",
        f"moves the same saved tensors to host memory, and inner saved-tensor hooks take precedence: {_ONE_ONLY}",
    ),
    _row("cpu_offloading", "offload", f"lets Transformer Engine move the same saved tensors: {_ONE_ONLY}"),
    _row("overlap_moe_expert_parallel_comm", "offload", _COMBINED),
    _row("enable_cuda_graph", "offload", _ADDRESSES),
    _row("external_cuda_graph", "offload", _ADDRESSES),
    _row("cuda_graph_impl", "offload", _ADDRESSES, fine=("none",)),
    _row("enable_cuda_graph", "comm", _REPLAYED),
    _row("external_cuda_graph", "comm", _REPLAYED),
    _row("cuda_graph_impl", "comm", _REPLAYED, fine=("none",)),
    _row(
        "context_parallel_size",
        "comm",
        "sends keys and values inside of Transformer Engine's attention; compressing beside it is not in this version",
        fine=(1,),
    ),
    _row("tp_comm_overlap", "comm", "sends activations from Transformer Engine's user buffers", ("tp",)),
    _row(
        "use_ring_exchange_p2p",
        "comm",
        "sends by torch.distributed.ring_exchange",
        ("pp_forward", "pp_backward"),
    ),
    _row("moe_token_dispatcher_type", "comm", "sends tokens by kernels of its own", ("ep",), _DISPATCHERS),
    _row(
        "overlap_moe_expert_parallel_comm",
        "comm",
        "runs exchanges of tokens on a stream of its own; compressing them is not in this version",
        ("ep",),
    ),
    _row(
        "nccl_ub",
        "comm",
        "sends from buffers that NCCL has registered, and payloads lie elsewhere",
        _GRADIENTS_AND_WEIGHTS,
    ),
    _row("fp8_param_gather", "comm", "gathers parameters in 8 bits already", ("zero_gather",)),
    _row(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "comm",
        "overwrites gathered parameters by gradients, and the next gather would be by difference from them",
        ("zero_gather",),
    ),
)

_WRAPPERS = {
    "FullyShardedDataParallel": "Megatron FSDP",
    "MegatronFSDP": "Megatron FSDP",
    "TorchFullyShardedDataParallel": "torch FSDP2",
}
"""Data parallelism that reduces gradients by itself."""
_SHARDS = "frees and gathers parameters behind saved tensors; offloading with it is not in this version"
_REDUCES = "reduces gradients and gathers parameters by itself; compressing with it is not in this version"


_FLAGS = {"fp4": "--fp4-format", "fp8": "--fp8-format", "num_moe_experts": "--num-experts"}
"""Options of Megatron's config that its command line calls by another name."""


def flag(option: str) -> str:
    """What users call an option."""
    return _FLAGS.get(option, "--" + option.replace("_", "-"))


def check_conflicts(chunks: Sequence[nn.Module], config: Config) -> None:
    """Check the options and wrappers of the chunks.

    Raises:
        ConfigError: names everything that conflicts with `config`.
    """
    problems = list(dict.fromkeys(problem for chunk in chunks for problem in _problems(chunk, config)))
    if problems:
        raise ConfigError(problems)


def wrappers_of(chunk: nn.Module) -> list[str]:
    """Data parallelism in a chunk that reduces gradients by itself, by its name."""
    found = (_WRAPPERS.get(type(module).__name__) for module in chunk.modules())
    return sorted({name for name in found if name is not None})


def _problems(chunk: nn.Module, config: Config) -> Iterator[ConfigIssue]:
    parallelism = getattr(chunk, "ddp_config", None)
    options = {**vars(_compat.model_config(chunk)), **({} if parallelism is None else vars(parallelism))}
    yield from conflicts(MEGATRON_CONFLICTS, config, options, lambda option: f"Megatron's {flag(option)}")
    wrappers = wrappers_of(chunk)
    for enabled, why in ((config.offload is not None, _SHARDS), (config.compresses, _REDUCES)):
        if enabled:
            for name in wrappers:
                yield ConfigIssue("Megatron's data parallelism", name, why, "DistributedDataParallel")
    reduced = _compressed(config, _GRADIENTS_AND_WEIGHTS)
    if reduced and _compat_comm.layout()["dp"] > 1 and next(_compat_comm.buckets(chunk), None) is None:
        why = "has no gradient buckets, so what DistributedDataParallel reduces would go uncompressed"
        off = ", ".join(f'"{name}": "off"' for name in reduced)
        allowed = f"the chunk as DistributedDataParallel wraps it, or {off}"
        yield ConfigIssue("a model chunk", type(chunk).__name__, why, allowed)
