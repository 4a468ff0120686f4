"""Carries out a plan in plain PyTorch: blocks are recomputed by the checkpoint function, or what they save is offloaded.

```python
profile = profile_blocks(model, step)
actions = plan_blocks(profile, machine, device_bytes)
runtime = ssdtrain.attach(model, config, policy=BlockPolicy(actions))
undo = recompute_blocks(model, actions)
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.policy import KEEP, OFFLOAD, Action, ForwardProfile, SavedTensorInfo
from ssdtrain.planner.plans import Limits, Problem, actions_for
from ssdtrain.planner.search import search
from ssdtrain.planner.step import Block, Machine, one_after_the_other
from ssdtrain.profile.blocks import ModelProfile
from ssdtrain.profile.modules import Running

__all__ = ["BlockPolicy", "plan_blocks", "recompute_blocks"]

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


class BlockPolicy:
    """An `OffloadPolicy` that does with a saved tensor what the plan says of the block that saved it. What is saved outside of
    all blocks stays.

    Args:
        actions: qualified name of a block to "keep", "recompute", "offload" (to the first tier with room), "host" or "ssd".

    Raises:
        ValueError: an action is none of these.
    """

    needs_modules = True

    def __init__(self, actions: Mapping[str, str]) -> None:
        unknown = sorted(set(actions.values()) - set(ACTIONS))
        if unknown:
            raise ValueError(f"the plan has the actions {unknown}; allowed: {', '.join(ACTIONS)}")
        self._actions = {name: ACTIONS[action] for name, action in actions.items()}
        self._known: dict[tuple[Running, ...], Action] = {}

    def decide(self, saved: SavedTensorInfo) -> Action:
        found = self._known.get(saved.modules)
        if found is None:
            named = (self._actions.get(module.name) for module in saved.modules)
            found = self._known[saved.modules] = next((action for action in named if action), KEEP)
        return found

    def observe(self, forward: ForwardProfile) -> None:
        pass


def recompute_blocks(
    model: nn.Module, actions: Mapping[str, str], checkpoint: Checkpoint | None = None
) -> Callable[[], None]:
    """Run the blocks whose action is "recompute" under the checkpoint function.

    Their `forward` is replaced on the instance; what was there comes back when the returned function is called.

    Args:
        checkpoint: default: one with the config's defaults.

    Raises:
        AttributeError: the model has no such block.
    """
    run = checkpoint or Checkpoint()
    undo: list[Callable[[], None]] = []
    for name, action in actions.items():
        if action != "recompute":
            continue
        block = model.get_submodule(name)
        own = block.__dict__.get("forward")
        block.forward = _Recomputed(run, block.forward)
        undo.append(lambda block=block, own=own: _restore(block, own))  # type: ignore[misc]

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


class _Recomputed:
    def __init__(self, checkpoint: Checkpoint, forward: Callable[..., Any]) -> None:
        self.checkpoint, self.forward = checkpoint, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(self.forward, *args, **kwargs)


def _restore(block: nn.Module, own: Callable[..., Any] | None) -> None:
    if own is None:
        del block.__dict__["forward"]
    else:
        block.forward = own
