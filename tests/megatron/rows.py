"""The layouts and models that Megatron trains without a GPU: the rows of the matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.processes import DEVICE


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        options: of TransformerConfig.
        ddp: of DistributedDataParallelConfig.
        offload: keys of the offload section, beside the directories.
        counted: what autograd saves is counted in a run of its own. That takes hooks, which some options do not stand.
        reversed: attach gets the chunks in the reverse order.
        evaluated: an evaluation follows each step.
        plan: the section, where there is one; then there are steps enough for a plan.
        tiers: with an offload section.
        reference: options of the run without offload, where Megatron alone does not train with the row's.
        frozen: modules of the model, by name, whose parameters get no gradients.
    """

    name: str
    world: int = 1
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    ep: int = 1
    cp: int = 1
    model: str = "gpt"
    microbatches: int = 4
    bf16: bool = False
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    counted: bool = True
    reversed: bool = False
    evaluated: bool = False
    plan: Any = None
    tiers: bool = True
    steps: int = 3
    reference: dict[str, Any] | None = None
    frozen: tuple[str, ...] = ()

    @property
    def recomputes(self) -> bool:
        """Its plan has nothing but recomputation to choose."""
        return self.plan is not None and not self.tiers and not self.encodes

    @property
    def encodes(self) -> bool:
        """Its plan has nothing to choose but what stays encoded."""
        return self.plan is not None and "encode" in self.plan

    @property
    def etp(self) -> int | None:
        """Tensor parallelism of experts: where they are spread over ranks, each of them is on one."""
        return 1 if self.ep > 1 else None

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SPREAD = {"distribute_saved_activations": True, **FULL}
DEALLOCATE = {"deallocate_pipeline_outputs": True}
INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
MOE = {
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_topk": 2,
    "add_bias_linear": False,
}
LOGGED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 1e-3}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}
FUSED = {"gradient_accumulation_fusion": True}
"""The weight's gradient is added to its sum inside of backward; with an overlapped reduction the weight is marked for it."""


QUICK = (
    "tp2 sp",
    "pp2 vp2",
    "dp2, distributed optimizer, overlap",
    "moe ep2",
    "tp2, plan, recompute",
    "cp2, bf16",
)
"""One row of each kind of parallelism: these are trained by `make test`."""

SLOW = (
    "one process",
    "recompute full, dropout",
    "recompute mlp with bias",
    "moe, recompute moe, evaluations",
    "bert",
    "t5",
    "dp2, overlap, fused, recompute full",
    "dp2, distributed optimizer, overlap both, bf16",
    "tp2 pp2, plan, recompute, bf16",
    "tp2 sp, plan, encode, bf16",
    "tp2 pp2 vp2, deallocate",
    "cp2, all to all, dropout",
    "tp2 sp cp2, recompute full",
)
"""`make test-all` trains these; what the others' layout is combined with, other rows have too: `make test-long` trains them."""


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


BIAS: dict[str, Any] = {"evaluated": True, "reference": {}, "counted": False}
"""Where a recomputed MLP returns its bias: Megatron's own function recurses in the first backward, so that the run without
offload recomputes nothing, which changes no bit."""

LEAST = {"objective": "memory", "max_slowdown": 0.99}
"""A plan that recomputes whatever may be."""
ENCODED = {"recompute": "off", "encode": "exact", "max_slowdown": 1.0}
"""A plan that keeps encoded whatever may be."""
PLANNED: dict[str, Any] = {"plan": LEAST, "tiers": False, "dropout": 0.1, "steps": 8, "counted": False}

ON_DEVICES = [
    Row("cp2, bf16", 2, cp=2, bf16=True),
    Row("cp2, all to all, dropout", 2, cp=2, bf16=True, dropout=0.1, options={"cp_comm_type": "a2a"}),
    Row("tp2 sp cp2, recompute full", 4, tp=2, cp=2, bf16=True, options={"sequence_parallel": True, **FULL}),
]
"""Rows whose attention is Transformer Engine's, which needs a device: context parallelism."""

UNWRITTEN = 14
"""Steps after which there is a plan in any case: before, one with tiers needs a store that has ended, and a slow drive may have
none."""

ROWS = [
    Row("one process"),
    Row("plan, recompute", **PLANNED),
    Row("dropout", dropout=0.1),
    Row("bf16", bf16=True),
    Row("half of the bytes", offload={"amount": "50%"}),
    Row("python engine", offload={"engine": "python"}),
    Row("recompute full", options=FULL),
    Row("recompute full, dropout", dropout=0.1, options=FULL),
    Row("recompute full, reentrant", dropout=0.1, options=FULL, checkpoint={"use_reentrant": True}),
    Row("recompute block", options=BLOCK),
    Row("recompute block, frozen embedding", options=BLOCK, frozen=("embedding",)),
    Row("recompute core_attn", options=selective("core_attn")),
    Row("recompute layernorm", options=selective("layernorm")),
    Row("recompute layernorm, mlp", options={"add_bias_linear": False, **selective("layernorm", "mlp")}),
    Row("recompute mlp with bias", options=selective("mlp"), **BIAS),
    Row(
        "recompute mlp with bias, reentrant",
        options=selective("mlp"),
        checkpoint={"use_reentrant": True},
        **BIAS,
    ),
    Row("recompute full, evaluations", dropout=0.1, options=FULL, evaluated=True),
    Row("moe", model="moe", options=MOE),
    Row("moe, recompute full", model="moe", options={**MOE, **FULL}),
    Row("moe, recompute moe", model="moe", options={**MOE, **selective("moe")}),
    Row("moe, recompute moe, evaluations", model="moe", options={**MOE, **selective("moe")}, evaluated=True),
    Row("moe, auxiliary losses, recompute full", model="moe", options={**MOE, **LOGGED, **FULL}),
    Row("bert", model="bert"),
    Row("t5", model="t5"),
    Row("tp2", 2, tp=2),
    Row("tp2 sp", 2, tp=2, options={"sequence_parallel": True}),
    Row("tp2, dropout, recompute full", 2, tp=2, dropout=0.1, options=FULL),
    Row("tp2, dropout, recompute full, distributed", 2, tp=2, dropout=0.1, options=SPREAD),
    Row("tp2, bert", 2, tp=2, model="bert"),
    Row("tp2, t5", 2, tp=2, model="t5"),
    Row("pp2", 2, pp=2),
    Row("pp2, one microbatch", 2, pp=2, microbatches=1),
    Row("pp2, deallocate", 2, pp=2, options=DEALLOCATE),
    Row("pp2, recompute full, deallocate", 2, pp=2, options={**FULL, **DEALLOCATE}),
    Row("pp2, recompute mlp with bias", 2, pp=2, options=selective("mlp"), **BIAS),
    Row(
        "tp2, recompute full, distributed, evaluations", 2, tp=2, dropout=0.1, options=SPREAD, evaluated=True
    ),
    Row("pp2, bert", 2, pp=2, model="bert"),
    Row("pp2 vp2", 2, pp=2, vp=2, options=INTERLEAVED),
    Row("pp2 vp2, chunks in reverse", 2, pp=2, vp=2, options=INTERLEAVED, reversed=True),
    Row("pp2 vp2, deallocate", 2, pp=2, vp=2, options={**INTERLEAVED, **DEALLOCATE}),
    Row("dp2", 2),
    Row("dp2, overlap", 2, ddp={"overlap_grad_reduce": True}),
    Row("dp2, overlap, fused", 2, ddp={"overlap_grad_reduce": True}, options=FUSED, counted=False),
    Row(
        "dp2, overlap, fused, recompute full",
        2,
        ddp={"overlap_grad_reduce": True},
        options={**FUSED, **FULL},
        counted=False,
    ),
    Row(
        "pp2, moe, global balancing, recompute moe",
        2,
        pp=2,
        model="moe",
        options={**MOE, **GLOBAL, **selective("moe")},
    ),
    Row("dp2, distributed optimizer", 2, ddp={"use_distributed_optimizer": True}),
    Row(
        "dp2, distributed optimizer, overlap",
        2,
        ddp={"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    ),
    Row(
        "dp2, distributed optimizer, overlap both, bf16",
        2,
        bf16=True,
        ddp={"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    Row("moe ep2", 2, ep=2, model="moe", options=MOE),
    Row("pp4", 4, pp=4),
    Row("pp4, deallocate", 4, pp=4, microbatches=6, options=DEALLOCATE),
    Row("tp2 pp2", 4, tp=2, pp=2),
    Row("pp2, plan, recompute, deallocate", 2, pp=2, options=DEALLOCATE, **PLANNED),
    Row(
        "dp2, distributed optimizer, overlap both, plan within a limit",
        2,
        ddp={"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        **{**PLANNED, "plan": {"device_limit": "3MiB"}},
    ),
    Row("tp2, plan, recompute", 2, tp=2, **PLANNED),
    Row(
        "tp2 sp, plan within a limit",
        2,
        tp=2,
        options={"sequence_parallel": True},
        **{**PLANNED, "plan": {"device_limit": "1536KiB"}},
    ),
    Row("tp2 pp2, plan, recompute, bf16", 4, tp=2, pp=2, bf16=True, **PLANNED),
    Row(
        "tp2 sp, plan, encode, bf16",
        2,
        tp=2,
        bf16=True,
        options={"sequence_parallel": True},
        **{**PLANNED, "plan": ENCODED},
    ),
    Row("tp2 pp2, plan", 4, tp=2, pp=2, counted=False, plan="auto", steps=UNWRITTEN),
    Row("tp2 pp2, recompute full, distributed", 4, tp=2, pp=2, dropout=0.1, options=SPREAD, counted=False),
    Row("tp2 sp pp2, bf16", 4, tp=2, pp=2, bf16=True, options={"sequence_parallel": True}),
    Row("tp2 pp2 vp2, deallocate", 4, tp=2, pp=2, vp=2, options={**INTERLEAVED, **DEALLOCATE}),
    Row(
        "dp2 pp2, distributed optimizer, overlap",
        4,
        pp=2,
        ddp={"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    ),
    Row(
        "dp2 tp2, distributed optimizer, recompute full, dropout",
        4,
        tp=2,
        dropout=0.1,
        options=FULL,
        ddp={"use_distributed_optimizer": True},
    ),
] + (ON_DEVICES if DEVICE == "cuda" else [])
