"""Outputs that Megatron frees and makes again (CheckpointWithoutOutput), in a loop without an adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

import ssdtrain
from ssdtrain.integration.patching import Patches
from ssdtrain.offload.tensors.eligible import Eligibility
from ssdtrain_megatron import _compat
from ssdtrain_megatron.identity import read_inputs_once
from tests.megatron import training
from tests.megatron.rows import MOE, Row, selective
from tests.megatron.training import Trainer
from tests.support.tensors import all_equal

MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "kv_channels": 32,
    "rope_type": "rope",
}
UP = {**MLA, **selective("mla_up_proj", "layernorm")}


class Attention(DotProductAttention):  # type: ignore[misc]
    """Megatron's local one, which does not know the names that latent attention calls its sizes by."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.fixture(autouse=True)
def attention_for_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSpecProvider, "core_attention", lambda self: Attention)
    # Its import of Transformer Engine's names always succeeds, with None in their place.
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False, raising=False)


def _trainer(row: Row, wanted: Callable[[], Any], **options: Any) -> Trainer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "get_gpt_layer_local_spec", lambda **_: wanted())
        if row.options.get("multi_latent_attention"):
            patch.setattr(training, "TransformerConfig", MLATransformerConfig)
        return Trainer(row, **options)


def _plain(row: Row, **options: Any) -> Trainer:
    """With the layer that Megatron's builder would choose."""
    known = {
        "num_experts": row.options.get("num_moe_experts"),
        "multi_latent_attention": row.options.get("multi_latent_attention", False),
        "qk_layernorm": options.get("qk_layernorm", False),
        "normalization": options.get("normalization"),
    }
    return _trainer(row, lambda: get_gpt_layer_local_spec(**known), **options)


def _run(trainer: Trainer, count: int = 2) -> list[Any]:
    """Losses, norms and all gradients, every bit of them."""
    found: list[Any] = []
    for number in range(count):
        found.append(trainer.step(number))
        parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
        found.append([p.main_grad.clone() for p in parameters])
    return found


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(a == b if isinstance(a, tuple) else all_equal(a, b) for a, b in zip(one, other, strict=True))


FREEING = [
    Row("layernorm", options=selective("layernorm")),
    Row("mla_up_proj, layernorm", options=UP),
    Row("moe, layernorm", options={**MOE, **selective("layernorm")}),
]


@pytest.mark.parametrize("row", FREEING, ids=lambda row: row.name)
def test_a_loop_of_ones_own_needs_no_adapter_for_them(
    config: dict[str, Any], row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.16 Megatron's function does not stand hooks of any kind, and is mended by hand."""
    expected = _run(_plain(row))
    patches = Patches()
    if megatron.core.__version__.split(".")[:2] < ["0", "16"]:
        read_inputs_once(patches)
    own = _plain(row)
    kept: list[Any] = []
    monkeypatch.setattr(Eligibility, "_exclude_storage", lambda _, storage: kept.append(storage.nbytes()))
    with ssdtrain.attach(own.chunks[0].module, config) as runtime:
        assert _same(_run(own), expected)
        assert kept  # or a store may write what has been freed, which is seen, and an error
        assert runtime.statistics().offload.saved_bytes > 2**20  # type: ignore[union-attr]
    patches.undo()


def test_inputs_are_read_once_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation and backward as before megatron-core 0.16, below hooks that only pass tensors on."""
    function = random.CheckpointWithoutOutputFunction
    contexts: list[Any] = []

    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        torch.autograd.backward(ctx.outputs, gradients)
        contexts.append(ctx)
        return (None, None, *(tensor.grad for tensor in inputs))

    def recompute(self: Any, _: torch.Tensor) -> None:
        with torch.enable_grad():
            output = self.run_function(*self.ctx.saved_tensors)
        storage = self.outputs[0].untyped_storage()
        storage.resize_(output.untyped_storage().nbytes())
        storage.copy_(output.untyped_storage())
        self.ctx.outputs = (output,)
        self.ctx = None

    def gradients() -> list[torch.Tensor | None]:
        x = torch.linspace(0, 1, 8, requires_grad=True)
        weight = torch.linspace(1, 2, 8, requires_grad=True)
        inner = random.CheckpointWithoutOutput()
        inner.fp8 = False
        y = inner.checkpoint(torch.mul, x * 1, weight)
        z = y * y
        inner.discard_output_and_register_recompute(z)
        z.sum().backward()
        return [x.grad, weight.grad]

    monkeypatch.setattr(function, "backward", backward)
    monkeypatch.setattr(random.CheckpointWithoutOutput, "_recompute", recompute)
    expected = gradients()
    passing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with passing:
        assert gradients() == [None, None]
    before = function.forward, function.backward
    patches = Patches()
    read_inputs_once(patches)
    with passing:
        found = gradients()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))  # type: ignore[arg-type]
    assert contexts[-1].ssdtrain_inputs is None
    patches.undo()
    assert (function.forward, function.backward) == before


def test_the_function_whose_outputs_are_freed_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert random.CheckpointWithoutOutputFunction.__name__ + "Backward" == _compat.FREEING_FUNCTION
    monkeypatch.delattr(random, "CheckpointWithoutOutputFunction")
    with pytest.raises(ImportError, match="CheckpointWithoutOutputFunction"):
        _compat.check()
