"""What the blocks of a model take: seconds of forward and backward, bytes saved, and bytes alive for a moment.

`profile_blocks` runs real steps; `count_blocks` runs one under fake tensors, which takes no memory and gives the bytes. torch
has `torch.distributed._tools.MemTracker` for peaks by category of a whole step; what it lacks is which block saves which
storage, each counted once, and times.

A block's saved bytes are those of the storages that autograd keeps because of an operation of the block, each storage once, in
the block that saved it first, parameters and buffers left out. Running a block again takes as long as its forward.

`plan_blocks` chooses an action for each of them:

```python
profile = profile_blocks(model, step)
actions = plan_blocks(profile, machine, device_bytes)
runtime = ssdtrain.attach(model, config, policy=BlockPolicy(actions))
undo = recompute_blocks(model, actions)
```
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ssdtrain.planner.model.types import Block, Machine, one_after_the_other
from ssdtrain.planner.plans import Limits, SearchProblem, actions_for
from ssdtrain.planner.search import search
from ssdtrain.profile.blocks import find_blocks

__all__ = ["BlockProfile", "CountedStep", "ModelProfile", "count_blocks", "plan_blocks", "profile_blocks"]

CountedStep = Callable[[], Tensor]
"""Runs the model's forward and returns the loss."""


@dataclass(frozen=True)
class BlockProfile:
    """One block, in one microbatch.

    Attributes:
        name: qualified, in the model.
        forward, backward: seconds, medians over steps; 0 where only bytes were counted.
        saved: bytes that autograd keeps because of it.
        inputs: bytes of the tensors that it is called with: what running it again needs.
        forward_transient: bytes alive during its forward at most, beyond what was before and what it saves.
        backward_transient: bytes alive during its backward at most, beyond what was when it began.
        storages: the bytes of each that `saved` counts, in the order in which they were saved.
    """

    name: str
    forward: float
    backward: float
    saved: int
    inputs: int
    forward_transient: int
    backward_transient: int
    storages: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelProfile:
    """A model's blocks in the order in which they run.

    Attributes:
        outside: bytes saved by operations outside of all blocks (embedding, output layer, loss).
        seconds: of forward and backward together; 0 where only bytes were counted.
        parameters, gradients: bytes.
    """

    blocks: tuple[BlockProfile, ...]
    outside: int
    seconds: float
    parameters: int
    gradients: int

    @property
    def saved(self) -> int:
        """Bytes saved in all."""
        return self.outside + sum(block.saved for block in self.blocks)


def profile_blocks(
    model: nn.Module, step: CountedStep, *, patterns: Sequence[str] = (), steps: int = 3
) -> ModelProfile:
    """Run `step` and its backward a few times and measure each block.

    Gradients of the parameters are as before afterwards; random generators and buffers move on as in any step.

    Args:
        model: whose blocks `step` runs.
        patterns: as `find_blocks` takes them.
        steps: timed ones, after one that counts bytes (and warms up).

    Raises:
        ValueError: the model has no blocks, or `step` runs none of them.
    """
    blocks = find_blocks(model, patterns)
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        counted = _run(model, blocks, step, timed=False)
        timed = [_run(model, blocks, step, timed=True) for _ in range(steps)]
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return _profile(model, counted, timed)


def count_blocks(
    make: Callable[[], tuple[nn.Module, CountedStep]], *, patterns: Sequence[str] = ()
) -> ModelProfile:
    """The same without times and without memory: model and step live on fake tensors.

    Args:
        make: builds the model and the step; everything in it is fake.

    Raises:
        ValueError: the model has no blocks, or the step runs none of them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports SymPy, a second

    with FakeTensorMode(allow_non_fake_inputs=True):
        model, step = make()
        return _profile(model, _run(model, find_blocks(model, patterns), step, timed=False), [])


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


class _Record:
    """What was seen of one block in one step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.forward = self.backward = 0.0
        self.inputs = self.forward_transient = self.backward_transient = 0
        self.storages: list[int] = []
        self.began = 0.0
        self.live = 0

    @property
    def saved(self) -> int:
        return sum(self.storages)


class _Run:
    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.outside = 0
        self.seconds = 0.0


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone(_: Any) -> None:
            self.now -= size
            if self._known.get(key) is reference:
                del self._known[key]

        reference = self._known[key] = weakref.ref(storage, gone)


def _run(model: nn.Module, blocks: dict[str, nn.Module], step: CountedStep, *, timed: bool) -> _Run:
    """One forward and backward."""
    found = _Run()
    stack: list[_Record] = []
    live = None if timed else _LiveBytes()
    fixed = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved: set[int] = set()

    def clock() -> float:
        if torch.cuda.is_available() and timed:
            torch.cuda.synchronize()
        return time.perf_counter()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in fixed and key not in saved:
            saved.add(key)  # autograd holds the storage, so no other gets its place
            if stack:
                stack[-1].storages.append(storage.nbytes())
            else:
                found.outside += storage.nbytes()
        return tensor

    def before(record_name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            record = _Record(record_name)
            tensors = {
                t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                for t in tree_iter((args, kwargs))
                if isinstance(t, Tensor) and t.untyped_storage()._cdata not in fixed
            }
            record.inputs = sum(tensors.values())
            found.records.append(record)
            stack.append(record)
            if live is not None:
                record.live = live.now
                live.peak = live.now
            for tensor in tree_iter((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(lambda gradient: backward_ends(record))
                    break
            record.began = clock()

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:
        record = stack.pop()
        record.forward = clock() - record.began
        if live is not None:
            record.forward_transient = max(live.peak - record.live - record.saved, 0)
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: backward_begins(record))
                break

    def backward_begins(record: _Record) -> None:
        if running and running[-1] is not record:
            backward_ends(running[-1])
        running.append(record)
        record.began = clock()
        if live is not None:
            record.live = live.peak = live.now

    def backward_ends(record: _Record) -> None:
        if not running or running[-1] is not record:
            return
        running.pop()
        record.backward = clock() - record.began
        if live is not None:
            record.backward_transient = max(live.peak - record.live, 0)

    running: list[_Record] = []
    hooks = []
    for name, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(before(name), with_kwargs=True))
        hooks.append(block.register_forward_hook(after))
    for parameter in model.parameters():
        parameter.grad = None
    try:
        began = clock()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if live is None:
                step().backward()  # type: ignore[no-untyped-call]
            else:
                with live:
                    step().backward()  # type: ignore[no-untyped-call]
        if running:
            backward_ends(running[-1])
        found.seconds = clock() - began
    finally:
        for hook in hooks:
            hook.remove()
    if not found.records:
        raise ValueError(f"the step ran none of the blocks {', '.join(blocks)}")
    return found


def _profile(model: nn.Module, counted: _Run, timed: Sequence[_Run]) -> ModelProfile:
    blocks = []
    for index, record in enumerate(counted.records):
        times = [run.records[index] for run in timed]
        blocks.append(
            BlockProfile(
                record.name,
                statistics.median(r.forward for r in times) if times else 0.0,
                statistics.median(r.backward for r in times) if times else 0.0,
                record.saved,
                record.inputs,
                record.forward_transient,
                record.backward_transient,
                tuple(record.storages),
            )
        )
    parameters = list(model.parameters())
    return ModelProfile(
        tuple(blocks),
        counted.outside,
        statistics.median(run.seconds for run in timed) if timed else 0.0,
        sum(p.nbytes for p in parameters),
        sum(p.nbytes for p in parameters if p.requires_grad),
    )
