"""Options of Megatron whose traffic the hooks do not see: an error at start that names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ssdtrain.comm import Policy
from ssdtrain.config import ConfigError, Problem
from ssdtrain_megatron import _compat, _compat_comm
from ssdtrain_megatron.conflicts import wrapper_problems

__all__ = ["check_conflicts"]

ANY: tuple[str, ...] = ()

# Option, the values that are fine, the dimensions that it concerns (ANY: all of them), and why another value is refused.
_MODEL: tuple[tuple[str, tuple[Any, ...], tuple[str, ...], str], ...] = (
    (
        "context_parallel_size",
        (1,),
        ANY,
        "sends keys and values inside of Transformer Engine's attention; compressing beside it is not in this version",
    ),
    (
        "tp_comm_overlap",
        (False,),
        ("tp",),
        "sends activations from Transformer Engine's user buffers",
    ),
    (
        "use_ring_exchange_p2p",
        (False,),
        ("pp_forward", "pp_backward"),
        "sends by torch.distributed.ring_exchange",
    ),
    (
        "moe_token_dispatcher_type",
        ("allgather", "alltoall", "alltoall_seq"),
        ("ep",),
        "sends tokens by kernels of its own",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        (False,),
        ("ep",),
        "runs exchanges of tokens on a stream of its own; compressing them is not in this version",
    ),
    *(
        (
            option,
            fine,
            ANY,
            "replays collectives from a CUDA graph, which a codec that sizes its messages cannot be in",
        )
        for option, fine in (
            ("enable_cuda_graph", (False,)),
            ("external_cuda_graph", (False,)),
            ("cuda_graph_impl", ("none",)),
        )
    ),
)
_DATA_PARALLEL: tuple[tuple[str, tuple[Any, ...], tuple[str, ...], str], ...] = (
    (
        "nccl_ub",
        (False,),
        ("dp", "dp_gather", "zero_gather"),
        "sends from buffers that NCCL has registered, and payloads lie elsewhere",
    ),
    (
        "fp8_param_gather",
        (False,),
        ("zero_gather",),
        "gathers parameters in 8 bits already",
    ),
    (
        "reuse_grad_buf_for_mxfp8_param_ag",
        (False,),
        ("zero_gather",),
        "overwrites gathered parameters by gradients, and the next gather would be by difference from them",
    ),
)


def check_conflicts(chunks: Sequence[nn.Module], policy: Policy) -> None:
    """Check for options whose traffic would silently stay uncompressed.

    Raises:
        ConfigError: names every option that conflicts.
    """
    problems = list(dict.fromkeys(problem for chunk in chunks for problem in _problems(chunk, policy)))
    if problems:
        raise ConfigError(problems)


def _problems(chunk: nn.Module, policy: Policy) -> Iterator[Problem]:
    tables = ((_compat.model_config(chunk), _MODEL), (getattr(chunk, "ddp_config", None), _DATA_PARALLEL))
    for options, table in tables:
        for option, fine, dimensions, why in table:
            value = getattr(options, option, None)
            asked = [name for name in dimensions if not policy.rules[name].off]
            if value is None or value in fine or (dimensions and not asked):
                continue
            allowed = (
                "leaving it out, or " + ", ".join(f'"{name}": "off"' for name in asked) + " in ssdtrain.comm"
                if asked
                else "leaving it out, or no ssdtrain.comm"
            )
            yield Problem(
                f"Megatron's --{option.replace('_', '-')}",
                value,
                f"together with ssdtrain.comm {why}",
                allowed,
            )
    reduced = [name for name in ("dp", "dp_gather", "zero_gather") if not policy.rules[name].off]
    if reduced and _compat_comm.layout()["dp"] > 1 and next(_compat_comm.buckets(chunk), None) is None:
        off = ", ".join(f'"{name}": "off"' for name in reduced)
        why = "has no gradient buckets, so what DistributedDataParallel reduces would go uncompressed"
        yield Problem(
            "a model chunk",
            type(chunk).__name__,
            why,
            f"the chunk as DistributedDataParallel wraps it, or {off}",
        )
    why = "reduces gradients and gathers parameters by itself; compressing with it is not in this version"
    yield from wrapper_problems(chunk, why)
