"""The models that benchmarks train. The GPT is the demo's, so that their figures speak of the same thing."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.gpu.models import Model
from examples.support.model import GPT, GPTConfig

__all__ = ["DTYPES", "GPT", "MODELS", "GPTConfig", "gpt"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the name that `--dtype` takes."""


def gpt(
    *,
    layers: int,
    hidden: int = 384,
    heads: int = 6,
    sequence: int = 512,
    recomputed_blocks: int = 0,
    vocabulary: int = 256,
) -> GPT:
    """Called with (tokens, targets), int64 of shape (microbatch, sequence), it returns the mean loss."""
    config = GPTConfig(layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=vocabulary)
    return GPT(config, recomputed_blocks=recomputed_blocks)


def other(
    kind: str,
    *,
    layers: int,
    hidden: int = 384,
    heads: int = 6,
    sequence: int = 512,
    vocabulary: int = 256,
) -> Model:
    """A BERT or T5 of the GPU's benchmark, without dropout: two steps have the same gradients."""
    return Model(
        kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        positions=sequence,
        vocabulary=vocabulary,
        dropout=0.0,
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt": gpt,
    "bert": partial(other, "bert"),
    "t5": partial(other, "t5"),
}
"""By the name that `--model` takes."""
