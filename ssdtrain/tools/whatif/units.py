"""Equal layers in a row as one block, so that a search of a deep model is as short as one of a shallow model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ssdtrain.planner.model.types import Block
from ssdtrain.planner.plans import SearchProblem

__all__ = ["LayerUnits", "in_units"]


@dataclass(frozen=True)
class LayerUnits:
    """A problem whose blocks stand for several equal ones each.

    Attributes:
        layers: how many of the blocks of the problem that it was made of, for each block.
    """

    problem: SearchProblem
    layers: tuple[int, ...]

    def expanded(self, actions: Sequence[str]) -> list[str]:
        """The actions of the blocks that it was made of, of those of its blocks."""
        return [action for action, count in zip(actions, self.layers, strict=True) for _ in range(count)]


def in_units(problem: SearchProblem, most: int) -> LayerUnits:
    """Join equal neighbours, so that about `most` blocks are left of a problem of one chunk. One with parts stays as it is."""
    [blocks] = problem.chunks
    size = -(-len(blocks) // most)
    units = list(_units(problem, blocks, size))
    layers = tuple(map(len, units))
    begins = [sum(layers[:number]) for number in range(len(units))]

    def of(numbers: frozenset[int]) -> frozenset[int]:
        return frozenset(number for number, begin in enumerate(begins) if begin in numbers)

    joined = [_joined([blocks[number] for number in unit]) for unit in units]
    decided = [block.saved for number, block in enumerate(joined) if number not in of(problem.fixed)]
    largest, machine = max(decided, default=0), problem.machine
    # A store of several layers begins with its last one: as many bytes have to be under way.
    machine = replace(
        machine,
        window=max(machine.window, largest),
        in_flight=max(machine.in_flight, 3 * largest),
        prefetch=max(machine.prefetch, largest),
        state_buffers=max(2, machine.state_buffers // size),
    )
    made = replace(
        problem,
        chunks=[joined],
        machine=machine if size > 1 else problem.machine,
        fixed=of(problem.fixed),
        impure=of(problem.impure),
        always=of(problem.always),
    )
    return LayerUnits(made, layers)


def _units(problem: SearchProblem, blocks: Sequence[Block], size: int) -> Iterator[list[int]]:
    """Numbers of the blocks that are joined."""

    def alike(number: int) -> object:
        settled = [number in numbers for numbers in (problem.fixed, problem.impure, problem.always)]
        return number if blocks[number].parts else (replace(blocks[number], name=""), settled)

    for _, group in groupby(range(len(blocks)), key=alike):
        numbers = list(group)
        count = -(-len(numbers) // size)
        for unit in range(count):
            yield numbers[unit * len(numbers) // count : (unit + 1) * len(numbers) // count]


def _joined(blocks: Sequence[Block]) -> Block:
    first, count = blocks[0], len(blocks)
    if count == 1:
        return first
    return replace(
        first,
        forward=count * first.forward,
        backward=count * first.backward,
        saved=count * first.saved,
        recompute=count * first.recompute,
        inputs=count * first.inputs,
        fixed=count * first.fixed,
        small=count * first.small,
        forward_loads=count * first.forward_loads,
        backward_loads=count * first.backward_loads,
        backward_stores=count * first.backward_stores,
        cpu_step=count * first.cpu_step,
        returns=count * first.returns,
        repeats=count,
    )
