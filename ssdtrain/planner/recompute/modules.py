"""Runs blocks of a model again in backward, under the checkpoint function."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.checkpoint import checkpoint as default_checkpoint
from ssdtrain.offload.functorch import top_hooks
from ssdtrain.planner.recompute.attributes import SameAttributes
from ssdtrain.planner.recompute.purity import has_other_parameters, may_run_again, transformed, versions
from ssdtrain.planner.recompute.trials import Proven, Recomputations
from ssdtrain.profile.containers import leaves

__all__ = ["recompute_blocks", "recompute_modules"]


def recompute_blocks(
    model: nn.Module, actions: Mapping[str, str], checkpoint: Checkpoint | None = None
) -> Callable[[], None]:
    """Run the blocks whose action is "recompute" under the checkpoint function: see `recompute_modules`.

    Raises:
        AttributeError: the model has no such block.
    """
    blocks = {name: model.get_submodule(name) for name, action in actions.items() if action == "recompute"}
    return recompute_modules(blocks, checkpoint)


def recompute_modules(
    blocks: Mapping[str, nn.Module],
    checkpoint: Checkpoint | None = None,
    *,
    owner: object = None,
    strict: Callable[[], bool] = lambda: False,
    recomputations: Recomputations | None = None,
    tried: bool = False,
) -> Callable[[], None]:
    """Run these blocks under the checkpoint function.

    Their `forward` is replaced on the instance. The function that is returned undoes this call, and no other one: where there
    are several for a block, the latest recomputes it. A call with an object that a second run could find changed (a cache) is
    not recomputed, nor one without gradients. A call that changes its input in place raises RuntimeError; one that writes into a
    dict or list does not: `ssdtrain.checkpoint` gives the second run what the first was called with.

    Args:
        checkpoint: default: as `ssdtrain.checkpoint`.
        owner: for whom the blocks are recomputed: until it is gone, also where nobody undoes it. None: until it is undone.
        strict: whether a call with such an object raises RuntimeError, since other ranks recompute the block.
        recomputations: says in which steps second runs are compared; None: each block has its own, and a call is a step.
        tried: backward uses what the forward saved, and the second run is only compared.
    """
    run, made = checkpoint or default_checkpoint, list[_Recomputed]()
    for name, block in blocks.items():
        below = block.__dict__.get("forward")
        while isinstance(below, _Recomputed):
            if below.ended:
                below.undo()
            below = below.forward
        block.forward = _Recomputed(run, name, block, owner, strict, recomputations, tried)
        made.append(block.forward)

    def restore() -> None:
        while made:
            made.pop().undo()

    return restore


class _Recomputed:
    """Stands as the forward of a block; a copy of the block has the forward that was there before."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        block: nn.Module,
        owner: object,
        strict: Callable[[], bool],
        recomputations: Recomputations | None,
        tried: bool,
    ) -> None:
        self.checkpoint, self.name, self.block, self.strict = checkpoint, name, block, strict
        self.tried, self.counts = tried, recomputations is None
        self.recomputations = Recomputations() if recomputations is None else recomputations
        self.forward, self.own = block.forward, "forward" in block.__dict__
        self._owner = None if owner is None else weakref.ref(owner)
        self._undone = False
        functools.update_wrapper(self, self.forward, updated=())

    @property
    def ended(self) -> bool:
        """It was undone, or its owner is gone: it only passes calls on."""
        return self._undone or (self._owner is not None and self._owner() is None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ended or not torch.is_grad_enabled() or transformed() or has_other_parameters(self.block):
            return self.forward(*args, **kwargs)
        recomputations = self.recomputations
        tries = self.tried or (recomputations.tries(self.name) and torch._C._current_graph_task_id() == -1)
        beside = top_hooks() if tries else None
        if recomputations.skips(self.name) or (self.tried and beside is None):
            return self.forward(*args, **kwargs)
        if not may_run_again((args, kwargs)):
            if self.strict():
                raise RuntimeError(_object_text(self.name, args, kwargs))
            return self.forward(*args, **kwargs)
        plain = self.forward
        while isinstance(plain, _Recomputed):  # one recomputation is enough
            plain = plain.forward
        # Of before: the block may replace what is in a dict or list.
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before, compared = versions(tensors), self.tried or recomputations.compares
        proven = Proven(self.name, plain, recomputations, compared=compared, beside=beside)
        recomputations.communicated = False
        outputs = self.checkpoint(SameAttributes(self.name, self.block, proven), *args, **kwargs)
        if self.counts:
            recomputations.step_ended()
        if versions(tensors) != before and beside is not None:
            proven.give_up("it changes its input in place")
        elif beside is not None and recomputations.communicated:
            proven.give_up()  # see Note: [Ranks] in `trials`
        elif beside is not None and not self.tried:
            proven.try_now((outputs, [vars(module) for module in self.block.modules()]))
        elif versions(tensors) != before:
            raise RuntimeError(
                f"ssdtrain.plan: the block {self.name!r} changes its input in place, and cannot run again from it in backward: "
                'use an operation that is not in place, leave the block out of plan.blocks, or set plan.recompute to "off"'
            )
        return outputs

    def undo(self) -> None:
        """Put back what was there before. Idempotent. Where somebody else has replaced the block's forward since, that stays."""
        self._undone = True
        above, found = None, self.block.__dict__.get("forward")
        while isinstance(found, _Recomputed) and found is not self:
            above, found = found, found.forward
        if found is not self:
            return
        if above is not None:
            above.forward, above.own = self.forward, self.own
            functools.update_wrapper(above, self.forward, updated=())
        elif self.own:
            self.block.forward = self.forward
        else:
            self.block.__dict__.pop("forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own:
            return operator.getitem, ([self.forward], 0)
        return getattr, (self.block, "forward")


def _object_text(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    given = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
    what = next(f"{key} ({type(value).__name__})" for key, value in given.items() if not may_run_again(value))
    return (
        f"ssdtrain.plan: the block {name!r}, which all ranks of its group recompute, is called with {what}, an object that is no "
        "tensor or plain value: without a second run here the others would wait for ever. Pass tensors (with a cache: "
        'use_cache=False), leave the block out of plan.blocks, or set plan.recompute to "off"'
    )
