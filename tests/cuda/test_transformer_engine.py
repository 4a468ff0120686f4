"""Transformer Engine's layers, on our stand-ins for its kernels: their results, and offload of what they save."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ssdtrain
from tests.cuda.transformer_engine import INSTALLED, install

if not INSTALLED:
    pytest.skip("transformer_engine is not installed", allow_module_level=True)
install()

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.pytorch.cpu_offload import mark_not_offload  # noqa: E402

HIDDEN, WIDE, HEADS, LENGTH, SEQUENCES = 32, 96, 2, 16, 2


def layers(dtype: torch.dtype) -> dict[str, nn.Module]:
    common: dict[str, Any] = {"params_dtype": dtype, "device": "cuda"}
    return {
        "Linear": te.Linear(HIDDEN, WIDE, **common),
        "LayerNorm": te.LayerNorm(HIDDEN, **common),
        "RMSNorm": te.RMSNorm(HIDDEN, zero_centered_gamma=True, **common),
        "LayerNormLinear": te.LayerNormLinear(HIDDEN, WIDE, normalization="RMSNorm", **common),
        "LayerNormLinear, returns the norm": te.LayerNormLinear(
            HIDDEN, WIDE, return_layernorm_output=True, **common
        ),
        **{
            f"LayerNormMLP, {name}": te.LayerNormMLP(HIDDEN, WIDE, activation=name, **common)
            for name in ("gelu", "qgelu", "relu", "srelu", "geglu", "reglu", "swiglu")
        },
        "TransformerLayer": te.TransformerLayer(
            HIDDEN,
            WIDE,
            HEADS,
            attention_dropout=0.1 if dtype == torch.bfloat16 else 0.0,
            hidden_dropout=0.1,
            fuse_qkv_params=True,
            self_attn_mask_type="causal",
            **common,
        ),
    }


def inputs(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(LENGTH, SEQUENCES, HIDDEN, generator=generator).to("cuda", dtype).requires_grad_()


def gradients(
    module: nn.Module, dtype: torch.dtype, between: Callable[[], object] = lambda: None
) -> list[Tensor]:
    """Output and gradients of one step, with something between forward and backward."""
    torch.manual_seed(3)
    module.zero_grad()
    x = inputs(dtype)
    output = module(x)
    parts = output if isinstance(output, tuple) else (output,)
    loss = torch.stack([part.float().square().sum() for part in parts]).sum()
    between()
    loss.backward()
    return [*(part.detach() for part in parts), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def copied() -> None:
    """Let everything that was saved leave the device, where it is to."""
    torch.cuda.synchronize()
    time.sleep(0.05)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", layers(torch.float32))
def test_gradients_of_each_layer_are_those_without_offload(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    module = layers(dtype)[name]
    expected = gradients(module, dtype)
    section = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
    runtime = ssdtrain.attach(module, {"offload": section, "report": {"interval": 0}})

    try:
        found = gradients(module, dtype, copied)
        statistics = runtime.statistics()
    finally:
        runtime.close()
    assert statistics is not None
    offload = statistics.offload
    assert 0 < offload.saved_bytes == offload.offloaded_bytes + offload.avoided_write_bytes
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
