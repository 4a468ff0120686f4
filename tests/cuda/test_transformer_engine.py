"""Transformer Engine's layers, on our stand-ins for its kernels: their results, and offload of what they save."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ssdtrain

te = pytest.importorskip("transformer_engine.pytorch")

HIDDEN, WIDE, HEADS, LENGTH, SEQUENCES = 32, 96, 2, 16, 2


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "srelu": lambda x: functional.relu(x).square(),
    "geglu": lambda x: functional.gelu(x[..., :WIDE], approximate="tanh") * x[..., WIDE:],
    "reglu": lambda x: functional.relu(x[..., :WIDE]) * x[..., WIDE:],
    "swiglu": lambda x: functional.silu(x[..., :WIDE]) * x[..., WIDE:],
}

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": partial(te.Linear, HIDDEN, WIDE),
    "LayerNorm": partial(te.LayerNorm, HIDDEN),
    "RMSNorm": partial(te.RMSNorm, HIDDEN, zero_centered_gamma=True),
    "LayerNormLinear": partial(te.LayerNormLinear, HIDDEN, WIDE, normalization="RMSNorm"),
    "LayerNormLinear, returns the norm": partial(
        te.LayerNormLinear, HIDDEN, WIDE, return_layernorm_output=True
    ),
    **{
        f"LayerNormMLP, {name}": partial(te.LayerNormMLP, HIDDEN, WIDE, activation=name)
        for name in ACTIVATIONS
    },
    "TransformerLayer": partial(
        te.TransformerLayer, HIDDEN, WIDE, HEADS, fuse_qkv_params=True, self_attn_mask_type="causal"
    ),
}


def layer(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return LAYERS[name](params_dtype=dtype, device="cuda")


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
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_each_layer_are_those_without_offload(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    module = layer(name, dtype)
    expected = gradients(module, dtype)
    section = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
    with ssdtrain.attach(module, {"offload": section, "report": {"interval": 0}}) as runtime:
        found = gradients(module, dtype, copied)
        statistics = runtime.statistics()
    offload = statistics.offload
    assert 0 < offload.saved_bytes == offload.offloaded_bytes + offload.avoided_write_bytes
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Stack(nn.Module):
    """Transformer layers, run in a way of Transformer Engine's.

    Args:
        way: "plain"; "checkpoint", its recomputation; "offload", its own copies to host memory.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(layer("TransformerLayer", torch.bfloat16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "offload":
            context, synchronise = te.get_cpu_offload_context(
                enabled=True, num_layers=1, model_layers=len(self.blocks)
            )
        for block in self.blocks:
            if self.way == "checkpoint":
                x = te.checkpoint(block, x)
            elif self.way == "offload":
                with context:
                    x = block(x)
                x = synchronise(x)
            else:
                x = block(x)
        return x


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("way", ["plain", "checkpoint", "offload"])
def test_a_stack_of_layers_beside_what_transformer_engine_does_itself(way: str, tmp_path: Path) -> None:
    module = Stack(way)
    expected = gradients(module, torch.bfloat16)
    section = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
    with ssdtrain.attach(module, {"offload": section, "report": {"interval": 0}}) as runtime:
        found = gradients(module, torch.bfloat16, copied)
        statistics = runtime.statistics()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # Its hooks are the inner ones, which take all.
    assert (statistics.offload.offloaded_bytes > 0) == (way != "offload")


def test_the_marks_of_tensors_that_must_stay_are_those_that_are_looked_for() -> None:
    _compat = pytest.importorskip("ssdtrain_megatron._compat")
    marked, other = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
    te.mark_not_offload(marked)
    assert _compat.marked_not_offload(marked) and not _compat.marked_not_offload(other)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_stand_in_computes_what_torch_computes(name: str) -> None:
    module = layer(f"LayerNormMLP, {name}", torch.float32)
    norm, bias, first, first_bias, second, second_bias = (p for _, p in module.named_parameters())

    def plain(x: Tensor) -> Tensor:
        x = functional.layer_norm(x, (HIDDEN,), norm, bias, eps=1e-5)
        return functional.linear(
            ACTIVATIONS[name](functional.linear(x, first, first_bias)), second, second_bias
        )

    found = gradients(module, torch.float32)
    module.zero_grad()
    x = inputs(torch.float32)
    output = plain(x)
    output.square().sum().backward()
    expected = [output.detach(), x.grad, *(p.grad for p in module.parameters())]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_is_that_of_torch(mask: str, dtype: torch.dtype) -> None:
    """Through the fused kernel's stand-in in bf16, and unfused in fp32."""
    attention = te.DotProductAttention(HEADS, HIDDEN // HEADS, attn_mask_type=mask, qkv_format="sbhd")
    torch.manual_seed(1)
    packed = torch.randn(LENGTH, SEQUENCES, HEADS, 3 * HIDDEN // HEADS, device="cuda", dtype=dtype)
    packed.requires_grad_()
    attention(*packed.chunk(3, -1)).float().square().sum().backward()
    found, packed.grad = packed.grad, None
    query, key, value = (part.permute(1, 2, 0, 3).float() for part in packed.chunk(3, -1))
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=mask == "causal")
    output.square().sum().backward()
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, packed.grad, rtol=tolerance, atol=tolerance)


def test_what_has_no_stand_in_is_named() -> None:
    import transformer_engine_torch as tex

    with pytest.raises(NotImplementedError, match="te_general_grouped_gemm"):
        tex.te_general_grouped_gemm()
