"""The cost model's one entrance: the time line of one training step, given what happens to each block's saved tensors.

`simulate` plays forward and backward passes of microbatches in a given order and returns step time, stalls, peak memory and bytes
per tier. It needs no device, and takes some microseconds per block and pass, so that a search can call it thousands of times.

```
computes  | block 0 | block 1 | block 2 | block 3 || back 3 | back 2 | wait | back 1 | back 0 |
link out            |= copy 0 =|= copy 1 =|             copy 2 was cancelled: 2 and 3 stay
tier                     |= write 0 ==|= write 1 ==|== read 1 ==|== read 0 ==|
link in                                                         |= copy 1 =|= copy 0 =|
memory     0        01        12 (0 left) 123       23              2        1        0
```

A store begins when its block's forward ends (of a device behind a link: in the hook of the next operator). What has left comes
back before its backward, as far ahead as `prefetch` and `window` allow. The rules are in `simulation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ssdtrain.planner.model.simulation import Simulation, simulation_of
from ssdtrain.planner.model.types import (
    DEVICE,
    KEPT,
    RECOMPUTE,
    Block,
    BlockTimes,
    Choice,
    Machine,
    Pass,
    StepTimeline,
)

__all__ = ["simulate"]


def simulate(
    chunks: Sequence[Sequence[Block]],
    choices: Sequence[Sequence[Choice]],
    order: Sequence[Pass],
    machine: Machine,
    *,
    steps: int = 1,
    memory: bool = False,
) -> StepTimeline:
    """The time line of one step; with `steps` that of the last one, which begins while transfers of those before are under way.

    Args:
        chunks: the blocks of each model chunk (virtual pipeline stage), in forward order.
        choices: one for each block, [chunk][block].
        order: the passes of one rank; each forward of a (chunk, microbatch) before its backward. A backward
        that never comes (an evaluation) leaves its bytes alive to the end of the step.
        machine: bandwidths and limits.
        memory: fill `StepTimeline.memory`.

    Raises:
        KeyError: a choice names a tier that the machine does not have, or a backward has no forward.
        ValueError: a chunk has another number of choices than of blocks.
    """
    for number, (blocks, chosen) in enumerate(zip(chunks, choices, strict=True)):
        if len(blocks) != len(chosen):
            raise ValueError(f"chunk {number} has {len(blocks)} blocks and {len(chosen)} choices")
    chunks, choices, owners = _expanded(chunks, choices)
    running = simulation_of(machine)(chunks, choices, machine, owners)
    last = {one.chunk: number for number, one in enumerate(order) if one.kind == "backward"}
    for step in range(steps):
        if step:
            running.next_step()
        for number, one in enumerate(order):
            if one.kind == "forward":
                running.forward(one.chunk, one.microbatch)
            else:
                running.backward(one.chunk, one.microbatch, last=number == last[one.chunk])
    outcome = _outcome(running, memory)
    if running.stepped:
        outcome.step_wait = running.host_steps.wait()
        outcome.seconds += outcome.step_wait
    outcome.blocks = [_folded(times, of) for times, of in zip(outcome.blocks, owners, strict=True)]
    return outcome


def _expanded(
    chunks: Sequence[Sequence[Block]], choices: Sequence[Sequence[Choice]]
) -> tuple[list[list[Block]], list[list[Choice]], list[list[int]]]:
    """Blocks in their parts, where any is offloaded and transfers go on between the parts; compressed and encoded ones as they
    are then; and of which block each is. A block that is recomputed is one, and so is an encoded one: what it saved comes again
    in backward too."""
    all_blocks, all_choices, all_owners = [], [], []
    for chunk, chosen in zip(chunks, choices, strict=True):
        blocks: list[Block] = []
        each: list[Choice] = []
        owners: list[int] = []
        moving = any(choice.tier != DEVICE for choice in chosen)
        for number, (block, choice) in enumerate(zip(chunk, chosen, strict=True)):
            if choice.compress and block.compressed is not None:
                block = block.compressed
            if choice.encode and block.encoded is not None:
                block, choice = block.encoded, RECOMPUTE
            parts = block.parts if moving and block.parts and not choice.recompute else (block,)
            blocks += parts
            each += _of_parts(choice, len(parts)) if choice.shares else [choice] * len(parts)
            owners += [number] * len(parts)
        all_blocks.append(blocks)
        all_choices.append(each)
        all_owners.append(owners)
    return all_blocks, all_choices, all_owners


@lru_cache(4096)
def _of_parts(choice: Choice, count: int) -> tuple[Choice, ...]:
    """What happens to each of the `count` parts of a block."""
    shares = (choice.shares + (0.0,) * count)[:count]
    return tuple(Choice(choice.tier, share=share) if share else KEPT for share in shares)


def _folded(times: Sequence[BlockTimes], owners: Sequence[int]) -> list[BlockTimes]:
    """The times of whole blocks, from those of `_expanded`."""
    if not owners or owners[-1] + 1 == len(owners):
        return list(times)
    found: list[BlockTimes] = [BlockTimes() for _ in range(owners[-1] + 1)]
    for one, owner in zip(times, owners, strict=True):
        found[owner].store_stall += one.store_stall
        found[owner].load_stall += one.load_stall
        found[owner].stored += one.stored
    return found


def _outcome(running: Simulation, memory: bool) -> StepTimeline:
    peak, when = running.memory.peak()
    leaves = any(choice.tier != DEVICE for choices in running.choices for choice in choices)
    buffers = running.machine.buffers if leaves or running.machine.buffers_stay else 0
    line = running.memory.line(running.began) if memory else []
    flat = [times for chunk in running.blocks for times in chunk]
    servers = running.servers
    return StepTimeline(
        running.now - running.began,
        running.compute,
        sum(times.store_stall for times in flat),
        sum(times.load_stall for times in flat),
        peak + buffers,
        when,
        {name: server.written for name, server in servers.items()},
        {name: server.read for name, server in servers.items()},
        {name: server.peak for name, server in servers.items()},
        running.blocks,
        [(at, live + buffers) for at, live in line],
    )
