"""LoRA: a frozen model with small trained factors beside each projection, as PEFT adds them, in Hugging Face's Trainer.

Written out here, so that the program needs no further package; `peft.get_peft_model(model, ...)` takes the place of `add_lora`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import transformers
from torch import nn
from transformers import set_seed

from examples.small.command import compare, parse
from examples.small.hugging_face import SHAPE, train_model


class LoRALinear(nn.Module):
    """`linear` plus a product of two factors of rank r: x A^T B^T; B is 0 at first."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T


def add_lora(model: nn.Module, names: Sequence[str] = ("q_proj", "v_proj")) -> None:
    """Freezes `model` and puts factors beside the linear layers of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child))


def train(directory: str | None) -> list[float]:
    set_seed(0)
    model = transformers.LlamaForCausalLM(SHAPE)
    add_lora(model)
    return train_model(model, directory)


def main(arguments: Sequence[str] | None = None) -> int:
    return compare(train, parse(arguments).directory)


if __name__ == "__main__":
    sys.exit(main())
