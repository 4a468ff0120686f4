"""Shapes on paper against small real models: parameters, FLOPs and saved bytes are counted, not asserted from the formula."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from examples.support.model import GPT, Block, GPTConfig
from ssdtrain.config.errors import InvalidValue
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer, model_state_bytes
from tests.planner.blocks import Experts, Llama, T5Decoder, count_saved_bytes

HIDDEN, SEQUENCE, BATCH, HEADS = 128, 64, 2, 4


def shape(family: str, **more: Any) -> Transformer:
    return Transformer.of(
        family, hidden=HIDDEN, layers=2, sequence=SEQUENCE, heads=HEADS, vocabulary=256, **more
    )


def gpt_block(model: Transformer) -> nn.Module:
    dropout = 0.1 if model.dropout else 0.0
    return Block(GPTConfig(hidden=model.hidden, heads=model.heads, sequence=model.sequence, dropout=dropout))


def bert_block(model: Transformer) -> nn.Module:
    return nn.TransformerEncoderLayer(
        model.hidden, model.heads, model.ffn, dropout=0.0, activation="gelu", batch_first=True
    )


CASES = {
    "gpt": (shape("gpt", dropout=False), gpt_block),
    "bert": (shape("bert", dropout=False), bert_block),
    "llama": (shape("llama"), Llama),
    "llama with grouped keys": (shape("llama", kv_heads=2), Llama),
    "llama, activation not fused": (shape("llama", fused=False), Llama),
    "mixtral": (shape("mixtral", experts=4), Experts),
    "t5 decoder": (shape("t5", dropout=False), T5Decoder),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_are_those_that_a_real_block_saves(name: str, dtype: torch.dtype) -> None:
    model, make = CASES[name]
    torch.manual_seed(0)
    block = make(model).to(dtype)
    kind = "decoder" if name == "t5 decoder" else "block"
    inputs = [torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=dtype, requires_grad=True)]
    others = []
    if kind == "decoder":
        # What the encoder put out is saved once for all decoder blocks.
        others = [torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=dtype)]
    counted = count_saved_bytes(block, lambda: block(*inputs, *others), *others)
    predicted = model.saved_bytes(BATCH, kind=kind, itemsize=dtype.itemsize)
    assert predicted == pytest.approx(counted, rel=0.01)


class FusedDropout(nn.Module):
    """What a GPU runs; on a CPU torch's own keeps the mask in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0]


def test_dropout_masks_are_a_byte_per_element() -> None:
    model = shape("gpt")
    block = gpt_block(shape("gpt", dropout=False)).to(torch.bfloat16)
    block.dropout = FusedDropout()
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    counted = count_saved_bytes(block, lambda: block(x))
    assert model.saved_bytes(BATCH) == pytest.approx(counted, rel=0.01)


def test_a_gpt_block_saves_34_sbh_as_published() -> None:
    model = Transformer.of("gpt", hidden=12288, layers=96, sequence=2048)
    published = 34 * 2048 * 12288
    assert model.saved_bytes(1) == pytest.approx(published, rel=0.005)
    split = model.saved_bytes(1, ParallelLayout(tp=8, sequence_parallel=True))
    assert split == pytest.approx(published / 8, rel=0.005)
    assert model.saved_bytes(1, ParallelLayout(tp=8)) == pytest.approx(
        (10 + 24 / 8) * 2048 * 12288, rel=0.005
    )


@pytest.mark.parametrize("name", ["gpt", "bert", "llama", "llama with grouped keys", "mixtral", "t5 decoder"])
def test_flops_and_parameters_are_those_of_a_real_block(name: str) -> None:
    model, make = CASES[name]
    block = make(model)
    kind = "decoder" if name == "t5 decoder" else "block"
    inputs = [torch.randn(BATCH, SEQUENCE, HIDDEN) for _ in range(2 if kind == "decoder" else 1)]
    # torch counts attention only where it is made of matrix products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        block(*inputs)
    assert model.block_flops(BATCH, kind) == counter.get_total_flops()
    assert model.block_parameters(kind) == sum(p.numel() for p in block.parameters())


def test_parameters_are_those_of_a_real_model() -> None:
    model = shape("gpt")
    real = GPT(GPTConfig(layers=2, hidden=HIDDEN, heads=HEADS, sequence=SEQUENCE, vocabulary=256))
    untied = real.head.weight.numel()
    assert model.parameters() == sum(p.numel() for p in real.parameters()) - untied


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (Transformer.of("gpt", hidden=12288, layers=96, sequence=2048, vocabulary=50257), 175e9),
        (Transformer.of("llama", hidden=4096, layers=32, sequence=4096), 6.74e9),
        (
            Transformer.of(
                "mixtral", hidden=4096, layers=32, sequence=4096, kv_heads=8, ffn=14336, vocabulary=32000
            ),
            46.7e9,
        ),
        (Transformer.of("bert", hidden=1024, layers=24, sequence=512, vocabulary=30522), 335e6),
    ],
    ids=["GPT-3", "Llama-2-7B", "Mixtral-8x7B", "BERT-large"],
)
def test_parameters_are_the_published_ones(model: Transformer, published: float) -> None:
    assert model.parameters() == pytest.approx(published, rel=0.01)


def test_model_state_is_split_as_zero_splits_it() -> None:
    assert sum(model_state_bytes(1e9, ParallelLayout()).values()) == 16e9
    assert sum(model_state_bytes(1e9, ParallelLayout(dp=4, zero=1)).values()) == 4e9 + 3e9
    assert sum(model_state_bytes(1e9, ParallelLayout(dp=4, zero=2)).values()) == 2e9 + 0.5e9 + 3e9
    assert sum(model_state_bytes(1e9, ParallelLayout(dp=4, zero=3)).values()) == 4e9


def test_impossible_shapes_name_what_is_wrong() -> None:
    with pytest.raises(InvalidValue, match="multiple of heads"):
        Transformer.of("gpt", hidden=100, layers=1, sequence=8, heads=3)
    with pytest.raises(InvalidValue, match="unknown family"):
        Transformer.of("rnn", hidden=100, layers=1, sequence=8)
    with pytest.raises(InvalidValue, match="ZeRO stage 4"):
        ParallelLayout(zero=4)
