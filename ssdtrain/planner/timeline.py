"""The cost model: the time line of one training step, given what happens to each block's saved tensors.

`simulate` plays forward and backward passes of microbatches in a given order and returns step time, stalls,
peak memory and bytes per tier. It needs no device, and takes some microseconds per block and pass, so that a
search can call it thousands of times. What is modelled is in `ssdtrain.planner.simulation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ssdtrain.planner.parts import expanded, folded
from ssdtrain.planner.simulation import Simulation
from ssdtrain.planner.step import Block, Choice, Machine, Pass, StepTimeline

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
    chunks, choices, owners = expanded(chunks, choices)
    running = Simulation(chunks, choices, machine)
    for number in range(steps):
        if number:
            running.next_step()
        for one in order:
            if one.kind == "idle":
                running.now += one.seconds
                running.idle += one.seconds
            elif one.kind == "forward":
                running.forward(one.chunk, one.microbatch)
            else:
                running.backward(one.chunk, one.microbatch)
    outcome = running.outcome(memory=memory)
    outcome.blocks = [folded(times, of) for times, of in zip(outcome.blocks, owners, strict=True)]
    return outcome
