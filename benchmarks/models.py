"""The models that benchmarks train. The GPT is the demo's, so that their figures speak of the same thing."""

from collections.abc import Callable

from torch import nn

from examples.support.model import GPT, GPTConfig

__all__ = ["GPT", "MODELS", "GPTConfig", "gpt"]


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


MODELS: dict[str, Callable[..., nn.Module]] = {"gpt": gpt}
"""By the name that `--model` takes."""
