"""Names of DeepSpeed that compressed inputs of linear layers depend on."""

from __future__ import annotations

from torch import nn

__all__ = ["PASSING_FUNCTIONS", "tensor_parallel_layers"]

PASSING_FUNCTIONS = ("PreBackwardFunctionForModule", "PostBackwardFunctionModule")
"""Of ZeRO-3, around every module's outputs and inputs; they return what they got, and backward calls ZeRO by them."""

_BASE = "TensorParallel_Layer"


def tensor_parallel_layers(model: nn.Module) -> list[str]:
    """Qualified names of the layers that AutoTP has put into `model`."""
    return [
        name
        for name, module in model.named_modules()
        if any(base.__name__ == _BASE for base in type(module).__mro__)
    ]
