"""What blocks take, real and under fake tensors, against counts that know nothing of blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.support.model import GPT, GPTConfig
from ssdtrain.tools.cli.estimate import from_config
from ssdtrain.tools.model_profile import CountedStep, count_blocks, profile_blocks
from tests.planner.blocks import count_saved_bytes

LAYERS, HIDDEN, SEQUENCE, BATCH = 3, 64, 32, 2


def make() -> tuple[nn.Module, CountedStep]:
    model = GPT(GPTConfig(layers=LAYERS, hidden=HIDDEN, heads=2, sequence=SEQUENCE))
    tokens = torch.randint(256, (BATCH, SEQUENCE))
    return model, lambda: model(tokens, tokens)


def test_saved_bytes_add_up_to_what_the_whole_step_saves() -> None:
    torch.manual_seed(0)
    model, step = make()
    found = profile_blocks(model, step, steps=1)
    assert found.saved == count_saved_bytes(model, step)
    assert len({block.saved for block in found.blocks}) == 1
    assert found.blocks[0].inputs == BATCH * SEQUENCE * HIDDEN * 4
    assert all(block.forward > 0 and block.backward > 0 for block in found.blocks)
    assert sum(block.forward + block.backward for block in found.blocks) < found.seconds
    assert all(block.backward_transient > 0 for block in found.blocks)


def test_fake_tensors_give_the_same_bytes_without_memory() -> None:
    model, step = make()
    real = profile_blocks(model, step, steps=1)
    fake = count_blocks(make)
    assert [(b.name, b.saved, b.inputs) for b in fake.blocks] == [
        (b.name, b.saved, b.inputs) for b in real.blocks
    ]
    assert (fake.outside, fake.parameters) == (real.outside, real.parameters)
    assert fake.seconds == 0


def test_gradients_are_as_before_and_hooks_are_gone() -> None:
    model, step = make()
    step().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: grad.clone() for name, grad in before.items() if grad is not None}
    profile_blocks(model, step, steps=1)
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        if name in copies:
            assert torch.equal(parameter.grad, copies[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_step_that_runs_no_block_is_an_error() -> None:
    model, _ = make()
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="ran none of the blocks"):
        profile_blocks(model, lambda: weight.sum())


def library_model(kind: str) -> tuple[nn.Module, CountedStep]:
    import transformers

    small: dict[str, Any] = {"vocab_size": 256}
    tokens = torch.randint(256, (BATCH, SEQUENCE))
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=64, n_layer=3, n_head=2, n_positions=64, **small)
        )
    elif kind == "bert":
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(
                hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=128, **small
            )
        )
    elif kind == "t5":
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=64, d_kv=32, d_ff=128, num_layers=3, num_heads=2, decoder_start_token_id=0, **small
            )
        )
    else:
        shape = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            **small,
        }
        shape["num_key_value_heads"] = 1
        if kind == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
        else:
            torch.set_default_dtype(
                torch.bfloat16
            )  # its grouped matrix products have no fake kernel in float32
            try:
                model = transformers.MixtralForCausalLM(
                    transformers.MixtralConfig(num_local_experts=4, **shape)
                )
            finally:
                torch.set_default_dtype(torch.float32)
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "bert", "t5"])
def test_a_config_of_a_library_is_counted_as_its_model_is_measured(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, _ = library_model(kind)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    build = from_config(tmp_path / "config.json", SEQUENCE)
    torch.manual_seed(0)
    real, step = build(BATCH)
    assert type(real) is type(model)
    measured = count_saved_bytes(real, step, *real.buffers())
    estimated = count_blocks(lambda: build(BATCH))
    assert len(estimated.blocks) == (6 if kind == "t5" else 3)
    assert estimated.saved == pytest.approx(measured, rel=0.05)
