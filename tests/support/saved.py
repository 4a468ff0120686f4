"""An operator that saves tensors which are given to it, and tensors that a codec of fixed size cannot hold."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SaveGiven", "any_bits", "bits"]


class SaveGiven(torch.autograd.Function):
    """Saves a tensor, and appends what backward has of it to a list."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, saved: torch.Tensor, came: list[torch.Tensor]) -> torch.Tensor:
        context.save_for_backward(saved)
        context.came = came
        return x + 1

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.came.append(context.saved_tensors[0].clone())
        return gradient, None, None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor` in host memory."""
    return tensor.cpu().contiguous().view(torch.uint8)


def any_bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values of every exponent, with NaN and Inf: the codec `exact` cannot hold 16384 or more of them."""
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    reach = torch.iinfo(integers)
    values = torch.randint(reach.min, reach.max, (count,), generator=torch.Generator().manual_seed(seed))
    return values.to(integers).view(dtype)
