"""Carries out a plan in plain PyTorch: blocks are recomputed by the checkpoint function, or what they save is offloaded.

```python
profile = profile_blocks(model, step)
actions = plan_blocks(profile, machine, device_bytes)
runtime = ssdtrain.attach(model, config, policy=BlockPolicy(actions))
undo = recompute_blocks(model, actions)
```
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ssdtrain.config import PlanConfig
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.policy import KEEP, OFFLOAD, REMEMBERED, Action, ForwardProfile, SavedTensorInfo
from ssdtrain.planner.plans import Limits, Problem, actions_for
from ssdtrain.planner.search import search
from ssdtrain.planner.step import Block, Machine, one_after_the_other
from ssdtrain.profile.blocks import ModelProfile, find_blocks
from ssdtrain.profile.modules import Running, plain_name
from ssdtrain.profile.spans import may_run_again

__all__ = ["BlockPolicy", "plan_blocks", "recomputable_blocks", "recompute_blocks", "recompute_modules"]

ACTIONS = {
    "keep": KEEP,
    "recompute": KEEP,  # of what is saved, only its inputs
    "offload": OFFLOAD,
    "host": Action(True, tier="host"),
    "ssd": Action(True, tier="ssd"),
}


def plan_blocks(profile: ModelProfile, machine: Machine, device_bytes: int) -> dict[str, str]:
    """The fastest action for each block of a measured model.

    Args:
        machine: whose tiers are called "host" and "ssd".
        device_bytes: what activations may take, those saved outside of blocks included.

    Returns:
        Name of a block to "keep", "recompute", "host" or "ssd".

    Raises:
        NoPlan: nothing fits; it has the smallest peak.
    """
    blocks = [
        Block(
            block.name,
            block.forward,
            block.backward,
            block.saved,
            recompute=block.forward,
            inputs=min(block.inputs, block.saved),
            forward_transient=block.forward_transient,
            backward_transient=block.backward_transient,
        )
        for block in profile.blocks
    ]
    blocks.append(Block("outside", 0.0, 0.0, 0, fixed=profile.outside))
    problem = Problem([blocks], one_after_the_other(), machine, actions_for(machine))
    best = search(problem, Limits(device_bytes))[0]
    return {block.name: action for block, action in zip(blocks[:-1], best.actions[:-1], strict=True)}


def recomputable_blocks(model: nn.Module, plan: PlanConfig) -> dict[str, nn.Module] | None:
    """The blocks of a model in plain PyTorch that a plan may recompute, by the names that policies see.

    Returns:
        None where nothing can be recomputed: the model is compiled or has no blocks, a block gathers sharded parameters in its
        forward (which ranks with other plans would not), or the config switches it off.

    Raises:
        ValueError: `plan.blocks` names no module.
    """
    if plan.recompute == "off" or any(_is_compiled(module) for module in model.modules()):
        return None
    try:
        found = find_blocks(model, plan.blocks)
    except ValueError:
        if plan.blocks:
            raise
        return None
    if any(_gathers(block) for block in found.values()):
        return None
    return {plain_name(name): block for name, block in found.items()}


def _gathers(block: nn.Module) -> bool:
    """Whether FSDP gathers parameters inside of the block's `forward`: FSDP2 does it in hooks around it."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    inner = (module for module in block.modules() if module is not block)
    return isinstance(block, FullyShardedDataParallel) or any(
        isinstance(module, FSDPModule | FullyShardedDataParallel) for module in inner
    )


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


class BlockPolicy:
    """An `OffloadPolicy` that does with a saved tensor what the plan says of the block that saved it.

    Args:
        actions: qualified name of a block to "keep", "recompute", "offload" (to the first tier with room), "host" or "ssd".
        rest: of what is saved outside of these blocks.

    Raises:
        ValueError: an action is none of these.
    """

    needs_modules = True

    def __init__(self, actions: Mapping[str, str], rest: str = "keep") -> None:
        self.follow(actions, rest)

    def follow(self, actions: Mapping[str, str], rest: str = "keep") -> None:
        """Do this from the next forward on. Called between steps."""
        unknown = sorted({*actions.values(), rest} - set(ACTIONS))
        if unknown:
            raise ValueError(f"the plan has the actions {unknown}; allowed: {', '.join(ACTIONS)}")
        self._actions = {name: ACTIONS[action] for name, action in actions.items()}
        self._rest = ACTIONS[rest]
        self._known: dict[tuple[Running, ...], Action] = {}
        self._first: list[int] = []  # bytes of the first forwards under these actions
        self._latest: deque[int] = deque(maxlen=REMEMBERED)

    def decide(self, saved: SavedTensorInfo) -> Action:
        found = self._known.get(saved.modules)
        if found is None:
            named = (self._actions.get(module.name) for module in saved.modules)
            found = self._known[saved.modules] = next((action for action in named if action), self._rest)
        return found

    def observe(self, forward: ForwardProfile) -> None:
        if not forward.saved_bytes:
            return
        if len(self._first) < REMEMBERED:
            self._first.append(forward.saved_bytes)
        self._latest.append(forward.saved_bytes)

    def shape_changed(self) -> bool:
        """The largest of the latest forwards differs from the largest of the first under these actions by a fifth and more."""
        if len(self._first) < REMEMBERED:
            return False
        before = max(self._first)
        return not 0.8 * before <= max(self._latest) <= 1.2 * before


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
    blocks: Mapping[str, nn.Module], checkpoint: Checkpoint | None = None
) -> Callable[[], None]:
    """Run these blocks under the checkpoint function.

    Their `forward` is replaced on the instance; what was there comes back when the returned function is called. A call with an
    object that a second run could find changed (a cache) is not recomputed, nor one without gradients.

    Args:
        checkpoint: default: one with the config's defaults.
    """
    run = checkpoint or Checkpoint()
    undo: list[Callable[[], None]] = []
    for block in blocks.values():
        own = block.__dict__.get("forward")
        block.forward = _Recomputed(run, block, block.forward, own is not None)
        undo.append(lambda block=block, own=own: _restore(block, own))  # type: ignore[misc]

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


class _Recomputed:
    """Stands as the forward of a block; a copy of the block has the forward that was there before."""

    def __init__(
        self, checkpoint: Checkpoint, block: nn.Module, forward: Callable[..., Any], own: bool
    ) -> None:
        self.checkpoint, self.block, self.forward, self.own = checkpoint, block, forward, own
        functools.update_wrapper(self, forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not may_run_again((args, kwargs)):
            return self.forward(*args, **kwargs)
        return self.checkpoint(self.forward, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own:
            return operator.getitem, ([self.forward], 0)
        return getattr, (self.block, "forward")


def _restore(block: nn.Module, own: Callable[..., Any] | None) -> None:
    if own is None:
        del block.__dict__["forward"]
    else:
        block.forward = own
