"""The linear function of a frozen weight and a trained low-rank matrix.

Shapes: N tokens, n input features, m output features, r features kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ssdtrain.compact.projection import project, unproject

__all__ = ["LowRankLinear"]


class LowRankLinear(torch.autograd.Function):
    """x W^T + z B^T, which saves z, or x where `saved` is x."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        saved: Tensor,
        weight: Tensor,
        factor: Tensor,
        bias: Tensor | None,
        block: Tensor,
        whole: bool,
        transposed: bool,
    ) -> Tensor:
        # Q is saved with z: a recomputation after a merge uses another projection.
        ctx.save_for_backward(saved, weight, factor, block)
        ctx.whole, ctx.transposed = whole, transposed
        with torch.autocast(x.device.type, enabled=False):
            z = project(x, block) if whole else saved
            cast = weight.to(x.dtype)
            y = F.linear(x, cast.t() if transposed else cast, bias.to(x.dtype) if bias is not None else None)
            return y + F.linear(z, factor.to(x.dtype))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, weight, factor, block = ctx.saved_tensors
        needs_x, _, _, needs_factor, needs_bias = ctx.needs_input_grad[:5]
        dx = dfactor = dbias = None
        with torch.autocast(gradient.device.type, enabled=False):
            gradient_NM = gradient.reshape(-1, gradient.shape[-1])
            if needs_x:
                cast = weight.to(gradient.dtype)
                dx = gradient @ (cast.t() if ctx.transposed else cast)
                dx = dx + unproject(gradient @ factor.to(gradient.dtype), block)
            if needs_factor:
                z = project(saved, block) if ctx.whole else saved
                dfactor = (gradient_NM.t() @ z.reshape(gradient_NM.shape[0], -1)).to(factor.dtype)
            if needs_bias:
                dbias = gradient_NM.sum(0)
        return dx, None, None, dfactor, dbias, None, None, None
