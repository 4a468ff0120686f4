"""Which layers of a model chunk `plan` may recompute: those of its TransformerBlocks, where nothing else recomputes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ssdtrain.config import Config, PlanConfig
from ssdtrain.integration.random_trackers import register_trackers
from ssdtrain.planner.plan_blocks import PlanBlocks, recomputable_blocks
from ssdtrain.profile.blocks import names_a_module
from ssdtrain_megatron import _compat
from ssdtrain_megatron.conflicts import flag, wrappers_of
from ssdtrain_megatron.recompute import has_grad_mode_side_effects

_EXCLUDED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "recompute_granularity": ("recomputes already", (None,)),
    "fp8": ("keeps scales that a second run would change", (None,)),
    "fp4": ("keeps scales that a second run would change", (None,)),
    "num_moe_experts": ("has routers that count tokens in their forwards", (None,)),
    "mtp_num_layers": ("runs layers of its own beside the blocks", (None, 0)),
    "context_parallel_size": (
        "exchanges keys and values in attention, with which this was never run",
        (None, 1),
    ),
    "enable_cuda_graph": ("replays forwards from CUDA graphs", (None, False)),
    "external_cuda_graph": ("replays forwards from CUDA graphs", (None, False)),
    "cuda_graph_impl": ("replays forwards from CUDA graphs", (None, "none")),
    "cpu_offloading": ("moves the same saved tensors", (None, False)),
    "fine_grained_activation_offloading": ("moves the same saved tensors", (None, False)),
    "overlap_moe_expert_parallel_comm": (
        "interleaves a forward and a backward layer by layer",
        (None, False),
    ),
}
"""Options of Megatron with which no layer is recomputed: why, and the values that are none of these."""


def plan_blocks(chunks: Sequence[nn.Module], config: Config) -> PlanBlocks | None:
    """What the plan of `config` may recompute; None where there is no plan.

    Args:
        chunks: of this rank, wrapped as the schedule gets them.
    """
    plan = config.plan if config.plans else None
    if plan is None:
        return None
    why = _why_none(chunks, config)
    if why:
        return PlanBlocks(why=why)
    if _is_empty_stage(chunks[0], plan):
        return PlanBlocks(why="this pipeline stage has none of the blocks", empty_stage=True)
    blocks = recomputable_blocks(chunks[0], plan) or {}
    if not blocks or not all(_compat.is_transformer_layer(block) for block in blocks.values()):
        return PlanBlocks(why="its blocks are no TransformerLayer")
    why = register_trackers()
    if why:
        return PlanBlocks(why=why)
    return PlanBlocks(blocks, group=None if config.compresses else _compat.tensor_group())


def _is_empty_stage(chunk: nn.Module, plan: PlanConfig) -> bool:
    """True where other pipeline stages may have layers that the plan is about and this one (the embedding, the loss) has none."""
    if _compat.pipeline_stages(chunk) == 1:
        return False
    if not plan.blocks:
        return not any(_compat.is_transformer_layer(module) for module in chunk.modules())
    return not names_a_module(chunk, plan.blocks)


def _why_none(chunks: Sequence[nn.Module], config: Config) -> str:
    """Why no layer of the chunks may be recomputed; "": some may."""
    if config.plan is not None and config.plan.recompute == config.plan.encode == "off":
        return "plan.recompute is off"
    if config.compact is not None:
        return "compact compresses what its linear layers save (with a plan that recomputes: not in this version)"
    if len(chunks) > 1:
        return "the rank has several model chunks (virtual pipeline stages)"
    options = vars(_compat.model_config(chunks[0]))
    for option, (why, fine) in _EXCLUDED.items():
        if options.get(option) not in fine:
            return f"Megatron's {flag(option)} {why}"
    if has_grad_mode_side_effects(_compat.model_config(chunks[0])):
        return "some of its modules count the runs of their forwards"
    wrappers = wrappers_of(chunks[0])
    if wrappers:
        return f"{', '.join(wrappers)} gathers parameters in forwards"
    return ""
