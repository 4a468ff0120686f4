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
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ssdtrain.config import PlanConfig
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.checkpoint import checkpoint as default_checkpoint
from ssdtrain.offload.functorch import top_hooks
from ssdtrain.offload.policy import KEEP, OFFLOAD, Action, ForwardProfile, ForwardSizes, SavedTensorInfo
from ssdtrain.planner.model.types import Block, Machine, one_after_the_other
from ssdtrain.planner.plan_blocks import check_patterns
from ssdtrain.planner.plans import Limits, SearchProblem, actions_for
from ssdtrain.planner.recomputations import Proven, Recomputations
from ssdtrain.planner.same_attributes import SameAttributes
from ssdtrain.planner.search import search
from ssdtrain.planner.spans import has_other_parameters, may_run_again, transformed, versions
from ssdtrain.profile.blocks import ModelProfile, find_blocks
from ssdtrain.profile.containers import leaves
from ssdtrain.profile.modules import Running, plain_name

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
    problem = SearchProblem([blocks], one_after_the_other(), machine, actions_for(machine))
    best = search(problem, Limits(device_bytes))[0]
    return {block.name: action for block, action in zip(blocks[:-1], best.actions[:-1], strict=True)}


def recomputable_blocks(model: nn.Module, plan: PlanConfig) -> dict[str, nn.Module] | None:
    """The blocks of a model in plain PyTorch that a plan may recompute (or compress), by the names that policies see.

    Returns:
        None where there are none: the model is compiled (or its blocks) or has none, a module is several blocks, a block gathers
        sharded parameters or communicates in its forward (which ranks with other plans would not), or the config switches it off.

    Raises:
        ConfigError: `plan.blocks` names no module.
    """
    check_patterns(model, plan)
    if (plan.recompute == "off" and not plan.compress) or any(
        _is_compiled(module) for module in model.modules()
    ):
        return None
    try:
        found = find_blocks(model, plan.blocks)
    except ValueError:
        return None
    if len(set(found.values())) < len(
        found
    ):  # a layer that is in the list several times has one name for policies
        return None
    if any(isinstance(block, torch.jit.ScriptModule) or _gathers(block) for block in found.values()):
        return None
    return {plain_name(name): block for name, block in found.items()}


def _gathers(block: nn.Module) -> bool:
    """Whether parameters may be gathered, or partial results reduced, inside of the block's `forward`.

    FSDP2 gathers the block that it is applied to in hooks around it, over a mesh of one dimension. Any other sharded parameter
    (tensor parallelism, FSDP inside of the block) makes the block's forward communicate. What communicates by hand is seen
    while it runs: `ssdtrain.planner.spans.Collectives`.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    inner = (module for module in block.modules() if module is not block)
    if isinstance(block, FullyShardedDataParallel) or any(
        isinstance(module, FSDPModule | FullyShardedDataParallel) for module in inner
    ):
        return True
    sharded = [parameter for parameter in block.parameters() if isinstance(parameter, DTensor)]
    return any(not isinstance(block, FSDPModule) or one.device_mesh.ndim > 1 for one in sharded)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


class BlockPolicy:
    """An `OffloadPolicy` that does with a saved tensor what the plan says of the block that saved it.

    Args:
        actions: qualified name of a block to "keep", "recompute", "offload" (to the first tier with room), "host" or "ssd".
        rest: of what is saved outside of these blocks.
        least: bytes; what is smaller stays.

    Raises:
        ValueError: an action is none of these.
    """

    needs_modules = True

    def __init__(self, actions: Mapping[str, str], rest: str = "keep", *, least: int = 0) -> None:
        self._least = least
        self.follow(actions, rest)

    def follow(self, actions: Mapping[str, str], rest: str = "keep", *, expected: int | None = None) -> None:
        """Do this from the next forward on. Called between steps.

        Args:
            expected: bytes that the largest forward saves then; None: what the first ones save.
        """
        unknown = sorted({*actions.values(), rest} - set(ACTIONS))
        if unknown:
            raise ValueError(f"the plan has the actions {unknown}; allowed: {', '.join(ACTIONS)}")
        self._actions = {name: ACTIONS[action] for name, action in actions.items()}
        self._rest = ACTIONS[rest]
        self._known: dict[tuple[Running, ...], Action] = {}
        self._expected, self._sizes = expected, ForwardSizes()

    def decide(self, saved: SavedTensorInfo) -> Action:
        if saved.nbytes < self._least:
            return KEEP
        found = self._known.get(saved.modules)
        if found is None:
            named = (self._actions.get(module.name) for module in saved.modules)
            found = self._known[saved.modules] = next((action for action in named if action), self._rest)
        return found

    def observe(self, forward: ForwardProfile) -> None:
        self._sizes.add(forward.saved_bytes)
        if self._sizes.forwards == ForwardSizes.REMEMBERED:  # the first ones under these actions
            self._sizes.settle()

    @property
    def largest(self) -> int:
        """Bytes of the largest of the latest forwards."""
        return self._sizes.largest()

    def shape_changed(self) -> bool:
        """The largest of the latest forwards differs from the largest of the first under these actions by a fifth and more, or is
        larger than expected by as much."""
        larger = self._expected is not None and self.largest > 1.2 * self._expected
        return larger or self._sizes.changed()


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
        outputs = self.checkpoint(SameAttributes(self.name, self.block, proven), *args, **kwargs)
        if self.counts:
            recomputations.step_ended()
        if versions(tensors) != before and beside is not None:
            proven.give_up("it changes its input in place")
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
