"""Bytes that `ssdtrain estimate` says for a command line, against those that megatron-core's own layers save.

`tests/megatron/test_estimated_bytes.py` has the layers of Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from tests.megatron.test_estimated_bytes import BATCH, HEADS, HIDDEN, SBH, SEQUENCE, predicted
from tests.planner.blocks import count_saved_bytes


@pytest.fixture(autouse=True)
def masks_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of dropout has a byte per element, as on a GPU."""

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    monkeypatch.setattr(F, "dropout", dropout)


@pytest.mark.parametrize("query_groups", [HEADS, 2])
def test_a_local_layer_saves_its_scores_as_estimated(query_groups: int) -> None:
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=query_groups,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
    )
    layer = build_module(get_gpt_layer_local_spec(), config=config, layer_number=1).bfloat16()
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    found = count_saved_bytes(layer, lambda: layer(x, attention_mask=mask)[0], mask)
    flags = f"--transformer-impl local --group-query-attention --num-query-groups {query_groups}"
    assert predicted(flags) == pytest.approx(found, rel=0.005)
    assert found == pytest.approx(34 * SBH + 5 * HEADS * SEQUENCE**2 * BATCH, rel=0.005)
