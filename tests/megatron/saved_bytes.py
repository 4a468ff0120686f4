"""Bytes that layers of Transformer Engine save under megatron-core, on a device: prints them as one line of JSON, by name.

Started by `test_estimated_bytes.py` as `python -m tests.megatron.saved_bytes`, in the environment that torchrun would make.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

warnings.filterwarnings("ignore")

from tests.megatron import cpu  # noqa: E402

cpu.arrange()

import megatron.core  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.nn import functional  # noqa: E402

from tests.megatron.rows import Row  # noqa: E402
from tests.megatron.test_estimated_bytes import BATCH, HEADS, HIDDEN, SEQUENCE  # noqa: E402
from tests.megatron.training import layout  # noqa: E402
from tests.planner.blocks import count_saved_bytes  # noqa: E402

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
    "ffn_hidden_size": 640,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


def saved(*, rotary: bool = False, **options: Any) -> int:
    """Bytes that one layer saves."""
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "bias_activation_fusion": True,
            "bias_dropout_fusion": True,
            "apply_rope_fusion": False,
            **options,
        }
    )
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts)
    layer = build_module(spec, config=config, layer_number=1).bfloat16().cuda()
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    turns = RotaryEmbedding(HIDDEN // HEADS, 1.0)(SEQUENCE).cuda() if rotary else None
    others = () if turns is None else (turns,)
    return count_saved_bytes(layer, lambda: layer(x, attention_mask=None, rotary_pos_emb=turns)[0], *others)


def main() -> None:
    cpu.join()
    with layout(Row("one process")):
        found = {
            "gpt": saved(),
            "llama": saved(**LLAMA),
            "llama, grouped queries": saved(num_query_groups=2, **LLAMA),
            "llama, rotary embeddings": saved(rotary=True, **LLAMA),
            "llama, experts": saved(**LLAMA, **EXPERTS),
        }
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
