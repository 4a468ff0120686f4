"""Which modules of a model are its blocks."""

import pytest
from torch import nn

from examples.support.model import GPT, GPTConfig
from ssdtrain.profile.blocks import find_blocks


def test_blocks_are_the_children_of_the_longest_list() -> None:
    model = GPT(GPTConfig(layers=3, hidden=64, heads=2, sequence=32))
    assert list(find_blocks(model)) == [f"blocks.{i}" for i in range(3)]
    assert list(find_blocks(model, ["blocks.1", "head"])) == ["blocks.1", "head"]
    assert list(find_blocks(model, ["blocks.0*"])) == ["blocks.0"]
    # The model itself, whose name is empty, is none.
    assert list(find_blocks(model, ["*"])) == [name for name, _ in model.named_children()]
    with pytest.raises(ValueError, match="no ModuleList"):
        find_blocks(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"no module is named by \('layer.*',\)"):
        find_blocks(model, ["layer.*"])


def test_an_encoder_and_a_decoder_of_different_lengths_are_both_found() -> None:
    model = nn.ModuleDict(
        {"encoder": nn.ModuleList([nn.Linear(2, 2)] * 2), "decoder": nn.ModuleList([nn.Linear(2, 2)] * 3)}
    )
    assert len(find_blocks(model)) == 5
