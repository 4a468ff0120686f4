"""Functions of megatron-core that rely on getting back, in backward, the very object that they saved.

Note: [The saved object]
Without hooks autograd hands back a saved leaf as the same Python object. With hooks of any kind it makes a new tensor of what
the unpack hook returns: the same bytes, without the attributes that somebody put on the object, and what is done to it is not
done to the leaf. Two functions do such things. The linear layer marks its weight when the fused kernel has added the weight's
gradient to `main_grad`, and the overlapped reduction waits for that mark. The reentrant checkpoint with distributed saved
activations puts the gathered data back into its input, which on every stage but the first is the leaf that the stage before
sent.

So both keep a reference to the leaf beside what they save, and their backward finds it among the saved tensors. Neither extends
a lifetime: the weight is a parameter, and the schedule holds what a stage received until its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["restore_saved_leaf", "stash_saved_leaf"]

Function = Callable[..., Any]


def stash_saved_leaf(position: int, plain: Function) -> Function:
    """`forward(ctx, *args)` of an autograd function that keeps `args[position]` on `ctx` if it is a leaf with gradients.

    Args:
        position: of the tensor among the arguments after `ctx`.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        result = plain(ctx, *args)
        tensor = args[position]
        if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad:
            ctx.ssdtrain_leaf = tensor
        return result

    return forward


def restore_saved_leaf(position: int, plain: Function) -> Function:
    """`backward(ctx, *gradients)` of such a function, which finds the leaf in `ctx.saved_tensors`.

    Args:
        position: of the tensor among the saved ones.
    """

    def backward(ctx: Any, *gradients: Any) -> Any:
        leaf = getattr(ctx, "ssdtrain_leaf", None)
        if leaf is None:
            return plain(ctx, *gradients)
        # Unpacked all the same: that is where a leaf that was modified in place is noticed.
        saved = list(ctx.saved_tensors)
        saved[position] = leaf
        return plain(_Context(ctx, tuple(saved)), *gradients)

    return backward


class _Context:
    """The context of a function, with other saved tensors."""

    def __init__(self, ctx: Any, saved_tensors: tuple[torch.Tensor, ...]) -> None:
        self._ctx = ctx
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
