"""LoRA models of PEFT: frozen layers keep no input, and the inputs of adapters are compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.runtime import Runtime
from tests.docs.blocks import block
from tests.support.tensors import equal_by_name

pytestmark = pytest.mark.slow

TOKENS, HIDDEN, LAYERS = 32, 64, 2
ATTENTION = "ScaledDotProduct"


@pytest.fixture(autouse=True)
def packages() -> None:
    """Imported here and not at the top: that takes seconds, also where these tests are not selected."""
    for name in ("peft", "transformers"):
        pytest.importorskip(name, reason="it is among requirements-dev.txt")


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, attn_implementation="sdpa")
    found: nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
    return found


def lora(dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """A Llama with adapters on q and v, whose second matrices are not zero."""
    import peft

    model = llama(dtype)
    adapters = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings}
    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**adapters), autocast_adapter_dtype=False)
    return found


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.randint(64, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # dropout
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def attach(model: nn.Module, **section: Any) -> Runtime:
    return ssdtrain.attach(model, {"compact": section, "report": {"interval": 0}})


def counted(runtime: Runtime) -> Any:
    return runtime.compact.compression.counted


def savers_of_linear_inputs(model: nn.Module) -> set[str]:
    """The names of autograd nodes that save the input of a layer, lora_B left out."""
    inputs: dict[int, Tensor] = {}

    def remember(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[args[0].untyped_storage().data_ptr()] = args[0].detach()

    hooks = [
        module.register_forward_pre_hook(remember)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lora_B" not in name
    ]
    loss = loss_of(model)
    for hook in hooks:
        hook.remove()
    found, seen, nodes = set(), set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [below for below, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += getattr(node, "saved_tensors", ())
        if any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() in inputs for t in saved):
            found.add(node.name())
    assert len(inputs) >= 4 * LAYERS
    return found


def test_without_compression_adapters_keep_the_inputs_that_they_share_with_frozen_layers() -> None:
    """What the next test would find if nothing were compressed."""
    assert any(not name.startswith(ATTENTION) for name in savers_of_linear_inputs(lora()))


@pytest.mark.parametrize("section", [{"ratio": 0.25}, {"mode": "quant"}], ids=["reconstruct", "quant"])
def test_no_layer_keeps_its_input(section: dict[str, Any]) -> None:
    model = lora()
    with attach(model, **section):
        # Attention saves its own output, which o_proj reads.
        assert all(name.startswith(ATTENTION) for name in savers_of_linear_inputs(model))


def test_the_adapters_of_one_input_share_what_is_saved() -> None:
    model = lora()
    expected = gradients(model)
    with attach(model, ratio=0.25) as runtime:
        found = gradients(model)
        assert counted(runtime).input_bytes == LAYERS * TOKENS * HIDDEN * 4
        assert counted(runtime).saved_bytes == counted(runtime).input_bytes // 4
        assert counted(runtime).shared_inputs == LAYERS
    changed = {name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-4)}
    assert changed == {name for name in expected if ".lora_A." in name}
    assert equal_by_name(gradients(model), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_layers_alone_change_no_bit(dtype: torch.dtype) -> None:
    model = lora(dtype)
    expected = gradients(model)
    with attach(model, exclude=["*.lora_A", "*.lora_B", "*lm_head"]) as runtime:
        found = gradients(model)
        assert counted(runtime).input_bytes == 0
        width = torch.finfo(dtype).bits // 8
        silu = LAYERS * TOKENS * 128 * width
        # In half precision, the float32 inputs of both norms of a layer but the first, whose input has no gradient.
        norms = (2 * LAYERS - 1) * TOKENS * HIDDEN * 2 if dtype == torch.bfloat16 else 0
        assert counted(runtime).released_bytes == silu + norms
    assert expected
    assert equal_by_name(found, expected)


def test_dropout_before_an_adapter() -> None:
    """Each adapter has an input of its own then, and both are compressed."""
    model = lora(lora_dropout=0.5).train()
    with attach(model, ratio=0.25) as runtime:
        gradients(model)
        assert counted(runtime).input_bytes == 2 * LAYERS * TOKENS * HIDDEN * 4
        assert counted(runtime).shared_inputs == 0


def test_the_example_of_the_page() -> None:
    import peft

    names: dict[str, Any] = {"peft": peft, "ssdtrain": ssdtrain, "model": llama(torch.bfloat16)}
    exec(compile(block("docs/compact.md", "model = peft").text, "docs/compact.md", "exec"), names)
    with names["runtime"] as runtime:
        found = gradients(names["model"])
        assert counted(runtime).shared_inputs == LAYERS
    assert all(".lora_" in name for name in found)
    assert len(found) == 2 * 2 * LAYERS
