"""The cost model: the time line of one training step, given what happens to each block's saved tensors.

`simulate` plays forward and backward passes of microbatches in a given order and returns step time, stalls,
peak memory and bytes per tier. It needs no device, and takes some microseconds per block and pass, so that a
search can call it thousands of times. What is modelled is in `ssdtrain.planner.simulation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ssdtrain.planner.parts import expanded, folded
from ssdtrain.planner.plans import Problem
from ssdtrain.planner.simulation import Simulation
from ssdtrain.planner.step import DEVICE, KEEP, Block, Choice, Machine, Pass, StepTimeline

__all__ = ["kept_step", "simulate"]


def kept_step(problem: Problem) -> StepTimeline:
    """The step that keeps everything."""
    choices = [[KEEP] * len(chunk) for chunk in problem.chunks]
    return simulate(problem.chunks, choices, problem.order, problem.machine)


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
    running = Simulation(chunks, choices, machine, owners)
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
    outcome = _outcome(running, memory)
    outcome.blocks = [folded(times, of) for times, of in zip(outcome.blocks, owners, strict=True)]
    return outcome


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
        running.idle,
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
