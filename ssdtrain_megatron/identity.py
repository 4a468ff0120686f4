"""Functions of megatron-core that rely on getting back, in backward, the very object that they saved.

Note: [The saved object]
Without hooks autograd hands back a saved leaf as the same Python object. With hooks of any kind it makes a new tensor of what
the unpack hook returns: the same bytes, without the attributes that were set on the object, and what is done to it is not
done to the leaf. Two functions do such things. The linear layer marks its weight when the fused kernel has added the weight's
gradient to `main_grad`, and the overlapped reduction waits for that mark. The reentrant checkpoint with distributed saved
activations puts the gathered data back into its input, which on every stage but the first is the leaf that the stage before
sent.

So both keep a reference to the leaf beside what they save, and their backward finds it among the saved tensors. Neither extends
a lifetime: the weight is a parameter, and the schedule holds what a stage received until its backward.

Note: [Inputs that are read twice]
Its recomputation runs on the inputs that it saved, and its backward reads them again, for the gradients that have come to them.
Before megatron-core 0.16 these are two readings of `ctx.saved_tensors`. Without hooks both are the very leaves that were saved.
With hooks of any kind each reading makes new tensors, the gradients go to the leaves behind them, and backward finds none: what
the block hands down is lost, silently. So they are read once, as leaves of their own, for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ssdtrain.integration.patching import Function, Patches, Wrap
from ssdtrain_megatron import _compat

__all__ = ["KEEPING_LEAVES", "read_inputs_once"]


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
        return plain(_Context(ctx, lambda: tuple(saved)), *gradients)

    return backward


KEEPING_LEAVES: dict[str, Wrap] = {
    "linear_forward": functools.partial(stash_saved_leaf, 1),
    "linear_backward": functools.partial(restore_saved_leaf, 1),
    "checkpoint_forward": functools.partial(stash_saved_leaf, 2),
    "checkpoint_backward": functools.partial(restore_saved_leaf, 0),
}
"""Wrappers of functions of `_compat.replaceable`. Saved are (input, weight), and the arguments after the first two."""


def _discarding_forward(plain: Function) -> Function:
    def forward(ctx: Any, run_function: Function, discarding: Any, *args: Any) -> Any:
        outputs = plain(ctx, run_function, discarding, *args)
        discarding.ctx = _Context(ctx, functools.partial(_leaves_of, ctx))  # for the recomputation
        return outputs

    return forward


def _discarding_backward(plain: Function) -> Function:
    def backward(ctx: Any, *gradients: Any) -> Any:
        try:
            return plain(_Context(ctx, functools.partial(_leaves_of, ctx)), *gradients)
        finally:
            ctx.ssdtrain_inputs = None  # the graph may live longer

    return backward


def _leaves_of(ctx: Any) -> tuple[Any, ...]:
    """The saved tensors of `ctx`, read once, as leaves."""
    found: tuple[Any, ...] | None = getattr(ctx, "ssdtrain_inputs", None)
    if found is None:
        found = ctx.ssdtrain_inputs = tuple(
            saved.detach().requires_grad_(saved.requires_grad) if isinstance(saved, torch.Tensor) else saved
            for saved in ctx.saved_tensors
        )
    return found


def read_inputs_once(patches: Patches) -> None:
    """Replace the two functions of CheckpointWithoutOutput's that are concerned. See Note: [Inputs that are read twice]."""
    wraps = {"discarding_forward": _discarding_forward, "discarding_backward": _discarding_backward}
    patches.replace_all(_compat.replaceable(), wraps)


class _Context:
    """The context of a function, with other saved tensors: those that `read` returns."""

    def __init__(self, ctx: Any, read: Callable[[], tuple[Any, ...]]) -> None:
        object.__setattr__(self, "_ctx", ctx)
        object.__setattr__(self, "_read", read)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self._read()  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)
