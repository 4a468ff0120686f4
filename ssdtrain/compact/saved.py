"""What a linear layer saves in place of its input, and the weight gradient computed from it.

Shapes: N tokens, n input features, m output features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssdtrain.codecs import FixedSizeCodec, Key
from ssdtrain.compact.projection import project, unproject


class Projected(NamedTuple):
    """z = x P; the gradient is (G^T z) P^T, which has n / r times fewer multiplications than G^T x."""

    block: Tensor
    """Q of P, see `projection`."""

    def compress(self, x: Tensor) -> Tensor:
        """The compressed form of `x` [..., n], a new tensor."""
        return project(x, self.block)

    def weight_gradient(self, gradient_NM: Tensor, saved: Tensor) -> Tensor:
        """An estimate of G^T x, [m, n], whose mean is exact.

        Args:
            saved: result of `compress`, or the concatenated results of several ranks with N / ranks tokens each.
        """
        return unproject(gradient_NM.t() @ saved.reshape(gradient_NM.shape[0], -1), self.block)


class Quantised(NamedTuple):
    """The payload of a codec with stochastic rounding, decoded in backward. float64 is encoded as float32."""

    codec: FixedSizeCodec
    key: Key
    shape: torch.Size
    """Shape of the input of one rank."""
    dtype: torch.dtype

    def compress(self, x: Tensor) -> Tensor:
        values = x.float() if self.dtype == torch.float64 else x
        size = self.codec.payload_bytes(x.numel(), values.dtype)
        payload = torch.empty(size, dtype=torch.uint8, device=x.device)
        self.codec.encode(values, payload, self.key)
        return payload

    def weight_gradient(self, gradient_NM: Tensor, saved: Tensor) -> Tensor:
        dtype = torch.float32 if self.dtype == torch.float64 else self.dtype
        size = self.codec.payload_bytes(self.shape.numel(), dtype)
        parts = saved.numel() // size
        x = torch.empty((parts, *self.shape), dtype=dtype, device=saved.device)
        for payload, part in zip(saved.view(parts, size), x, strict=True):
            self.codec.decode(payload, part)
        return gradient_NM.t() @ x.view(gradient_NM.shape[0], -1).to(gradient_NM.dtype)


SavedInput = Projected | Quantised
"""How one input is compressed. Immutable: a graph from an earlier step keeps its own."""
