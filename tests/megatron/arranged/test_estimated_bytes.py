"""Bytes that `ssdtrain estimate` says for a command line, against those that layers of megatron-core save.

Kernels that this machine has not are stood in for: attention is torch's, a mask of dropout has a byte per element (as on a GPU),
an RMSNorm is one function.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from ssdtrain.tools.whatif.hardware import find_gpu
from ssdtrain.tools.whatif.megatron_command import read
from tests.planner.blocks import RMSNorm, count_saved_bytes

HIDDEN, HEADS, SEQUENCE, BATCH = 256, 4, 128, 2
SBH = SEQUENCE * BATCH * HIDDEN
SHAPE = f"--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQUENCE} --bf16"
LLAMA = "--normalization RMSNorm --swiglu --ffn-hidden-size 640 --hidden-dropout 0 --attention-dropout 0"


class OneKernel(torch.nn.Module):
    """Attention that saves queries, keys, values, its output and a sum per row."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return y.permute(2, 0, 1, 3).flatten(2)


class OneKernelNorm(RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size)


@pytest.fixture(autouse=True)
def masks_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    monkeypatch.setattr(F, "dropout", dropout)


def predicted(flags: str) -> int:
    words = f"pretrain_gpt.py {SHAPE} --micro-batch-size {BATCH} {flags}".split()
    return read(words, {}, find_gpu("h100")).job.model.saved_bytes(BATCH)


def saved(*, one_kernel: bool, rotary: bool = False, **options: Any) -> int:
    """Bytes that one layer saves."""
    model_parallel_cuda_manual_seed(1)
    llama = options.get("normalization") == "RMSNorm"
    given = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "attention_softmax_in_fp32": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
    }
    if llama:
        given |= {
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "ffn_hidden_size": 640,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
    spec = get_gpt_layer_local_spec(
        num_experts=options.get("num_moe_experts"), normalization=options.get("normalization")
    )
    if one_kernel:
        spec.submodules.self_attention.submodules.core_attention = OneKernel
    if llama:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = OneKernelNorm
    layer = build_module(spec, config=TransformerConfig(**(given | options)), layer_number=1).bfloat16()
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    turns = RotaryEmbedding(HIDDEN // HEADS, 1.0, use_cpu_initialization=True)(SEQUENCE) if rotary else None
    return count_saved_bytes(layer, lambda: layer(x, attention_mask=mask, rotary_pos_emb=turns)[0], mask)


def test_a_gpt_layer_with_one_kernel_for_attention_saves_34_sbh_as_estimated() -> None:
    found = saved(one_kernel=True)
    assert predicted("") == pytest.approx(found, rel=0.005)
    assert found == pytest.approx(34 * SBH, rel=0.005)


@pytest.mark.parametrize("query_groups", [HEADS, 2])
def test_a_local_layer_saves_its_scores_as_estimated(query_groups: int) -> None:
    flags = f"--transformer-impl local --group-query-attention --num-query-groups {query_groups}"
    found = saved(one_kernel=False, num_query_groups=query_groups)
    assert predicted(flags) == pytest.approx(found, rel=0.005)
    assert found == pytest.approx(34 * SBH + 5 * HEADS * SEQUENCE**2 * BATCH, rel=0.005)


def test_a_llama_layer_saves_what_is_estimated() -> None:
    assert predicted(LLAMA) == pytest.approx(saved(one_kernel=True, normalization="RMSNorm"), rel=0.005)


def test_local_layers_with_grouped_or_turned_queries_save_copies_that_are_not_estimated() -> None:
    """The projections' output stays as long as the values, which are a part of it."""
    grouped = f"{LLAMA} --group-query-attention --num-query-groups 2"
    found = saved(one_kernel=True, normalization="RMSNorm", num_query_groups=2)
    assert predicted(grouped) + 2 * SBH == pytest.approx(found, rel=0.005)
    turned = saved(one_kernel=True, normalization="RMSNorm", rotary=True)
    assert predicted(LLAMA) + 4 * SBH == pytest.approx(turned, rel=0.03)  # and sines and cosines


def test_of_experts_more_is_estimated_than_a_layer_saves() -> None:
    """megatron-core multiplies by a token's probabilities before the last matrix, and need not save what comes out."""
    flags = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512"
    options = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 512}
    options |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
    found = saved(one_kernel=True, normalization="RMSNorm", **options)
    assert predicted(flags) - 2 * 2 * SBH == pytest.approx(found, rel=0.02)
    assert 1 < predicted(flags) / found < 1.1
