"""Megatron's CheckpointWithoutOutput below saved-tensor hooks.

Note: [Inputs that are read twice]
Its recomputation runs on the inputs that it saved, and its backward reads them again, for the gradients that have come to them.
Before megatron-core 0.16 these are two readings of `ctx.saved_tensors`. Without hooks both are the very leaves that were saved.
With hooks of any kind each reading makes new tensors, the gradients go to the leaves behind them, and backward finds none: what
the block hands down is lost, silently. So they are read once, as leaves of their own, for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ssdtrain.integration.patching import Patches
from ssdtrain_megatron import _compat

__all__ = ["read_inputs_once"]

Function = Callable[..., Any]


def read_inputs_once(patches: Patches | None = None) -> Patches:
    """Replace the two functions of CheckpointWithoutOutput's that are concerned. See Note: [Inputs that are read twice].

    Returns:
        `patches`, whose `undo` restores them.
    """
    patches = Patches() if patches is None else patches
    for place, wrap in zip(_compat.discarding_function(), (_forward, _backward), strict=True):
        patches.replace(*place, wrap)
    return patches


def _forward(plain: Function) -> Function:
    def forward(ctx: Any, run_function: Function, discarding: Any, *args: Any) -> Any:
        outputs = plain(ctx, run_function, discarding, *args)
        discarding.ctx = _Context(ctx)  # for the recomputation
        return outputs

    return forward


def _backward(plain: Function) -> Function:
    def backward(ctx: Any, *gradients: Any) -> Any:
        try:
            return plain(_Context(ctx), *gradients)
        finally:
            ctx.ssdtrain_inputs = None  # the graph may live longer

    return backward


class _Context:
    """The context of a function, whose saved tensors are read once and are leaves."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] | None = getattr(self._ctx, "ssdtrain_inputs", None)
        if found is None:
            found = self._ctx.ssdtrain_inputs = tuple(_leaf(saved) for saved in self._ctx.saved_tensors)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def _leaf(saved: Any) -> Any:
    return saved.detach().requires_grad_(saved.requires_grad) if isinstance(saved, torch.Tensor) else saved
