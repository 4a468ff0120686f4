"""The question which parts of blocks leave, as a search over regions asks it.

Some blocks of a plan are recomputed, compressed or encoded. The others are cut into units of neighbouring parts, about `UNITS` in
all, as many as a plan by regions decides about. Units are kept or offloaded, and the answer is a plan by blocks again, with
actions of `in_part`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssdtrain.planner.model.types import DEVICE, KEPT, Block, Choice
from ssdtrain.planner.plans import SHARES, SearchProblem, in_part

__all__ = ["UNITS", "CutBlocks", "cut_blocks", "runs", "streamed"]

UNITS = 64
"""Number of units up to which blocks are cut."""


@dataclass(frozen=True)
class CutBlocks:
    """The blocks of a plan in units.

    Attributes:
        problem: whose blocks are the units.
        begin: what the plan does with each unit.
        tier: the action that offloads a block.
        settled: the actions of blocks that are not in question, by their numbers.
        sizes: how many parts each unit of each block has.
        whole: numbers of the blocks without parts, which leave whole or not at all.
    """

    problem: SearchProblem
    begin: tuple[str, ...]
    tier: str
    settled: Mapping[int, str]
    sizes: tuple[tuple[int, ...], ...]
    whole: frozenset[int]

    def joined(self, actions: Sequence[str]) -> list[str]:
        """The actions of blocks, of those of all units."""
        names, found = iter(actions), []
        for number, sizes in enumerate(self.sizes):
            shares = [_eighths(next(names)) for _ in sizes]
            if number in self.whole:
                shares = [SHARES if shares[0] else 0]
            if number in self.settled:
                found.append(self.settled[number])
            elif set(shares) == {0}:
                found.append("keep")
            elif set(shares) == {SHARES}:
                found.append(self.tier)
            else:
                parts = [share for share, size in zip(shares, sizes, strict=True) for _ in range(size)]
                found.append(in_part(self.tier, parts))
        return found


def cut_blocks(problem: SearchProblem, actions: Sequence[str]) -> CutBlocks:
    """Cut the blocks that a plan with these actions keeps or offloads. There is one tier."""
    [tier] = [name for name, choice in problem.actions.items() if choice.tier != DEVICE]
    decided = set(problem.decided)
    settled = {
        number: name
        for number, name in enumerate(actions)
        if number not in decided or (problem.choice(name).tier == DEVICE and name != "keep")
    }
    most = UNITS // max(1, len(decided - settled.keys()))
    numbers, sizes, begin, chunks = iter(actions), list[tuple[int, ...]](), list[str](), list[list[Block]]()
    number, fixed = 0, set[int]()
    for blocks in problem.chunks:
        cut: list[list[Block]] = []
        for block in blocks:
            action = next(numbers)
            if number in settled:
                fixed.add(len(begin))
                of = _sizes(block, 1)
                units = [_settled(block, problem.choice(action))]
            else:
                of = _sizes(block, most)
                units = _cut(block, of)
            begin += _names(problem, tier, action, of)
            sizes.append(of)
            cut.append(units)
            number += 1
        chunks.append(_renumbered(cut))
    shares = {}
    if problem.machine.copies is not None:
        choice = problem.actions[tier]
        shares = {in_part(tier, [one]): replace(choice, share=one / SHARES) for one in range(1, SHARES)}
    made = replace(
        problem,
        chunks=chunks,
        actions={"keep": KEPT, tier: problem.actions[tier]},
        fixed=frozenset(fixed),
        impure=frozenset(),
        always=frozenset(),
        parts=shares,
        by_parts=False,
    )
    whole = frozenset(number for number, block in enumerate(problem.blocks) if len(block.parts) < 2)
    return CutBlocks(made, tuple(begin), tier, settled, tuple(sizes), whole)


def _eighths(action: str) -> int:
    """How much of a unit leaves."""
    shares = action.partition(":")[2]
    return int(shares) if shares else 0 if action == "keep" else SHARES


def _names(problem: SearchProblem, tier: str, action: str, sizes: Sequence[int]) -> list[str]:
    """What the action of a block does with each of its units."""
    name, _, shares = action.partition(":")
    if name != tier:
        return ["keep"] * len(sizes)
    if not shares:
        return [tier] * len(sizes)
    shares = shares.ljust(sum(sizes), "0")  # it may be of a block with fewer parts
    firsts = [int(shares[sum(sizes[:unit])]) for unit in range(len(sizes))]
    whole = problem.machine.copies is None
    return [
        tier if one == SHARES or (one and whole) else in_part(tier, [one]) if one else "keep"
        for one in firsts
    ]


def _sizes(block: Block, most: int) -> tuple[int, ...]:
    """Numbers of parts of at most about `most` units."""
    if most < 2 or len(block.parts) < 2:
        return (len(block.parts) or 1,)
    found = [end - begin for begin, end in runs([part.saved for part in block.parts], most)]
    while len(found) > 1 and not sum(part.saved for part in block.parts[-found[-1] :]):
        found[-2:] = [found[-2] + found[-1]]  # what comes after its last saved tensor
    return tuple(found)


def _cut(block: Block, sizes: Sequence[int]) -> list[Block]:
    if len(sizes) == 1:
        return [block]
    units, at = [], 0
    for size in sizes:
        parts = block.parts[at : at + size]
        units.append(parts[0] if size == 1 else _joined(block.name, parts))
        at += size
    return units


def _joined(name: str, parts: Sequence[Block]) -> Block:
    sums = ("forward", "backward", "saved", "small", "storing", "loading", "held")
    last = ("backward_loads", "continues")
    first = ("first_operator", "forward_loads", "backward_stores", "cpu_step", "returns")
    return Block(
        name,
        **{field: sum(getattr(part, field) for part in parts) for field in sums},
        **{field: getattr(parts[0], field) for field in first},
        **{field: getattr(parts[-1], field) for field in last},
        parts=tuple(parts),
    )


def _settled(block: Block, choice: Choice) -> Block:
    """A block that computes and holds, kept, what `block` does under `choice`."""
    if choice.compress and block.compressed is not None:
        block = block.compressed
    if choice.encode and block.encoded is not None:
        block = block.encoded
    elif not choice.recompute:
        return block
    alive = min(block.saved + block.small, block.inputs + block.largest_two)
    return replace(
        block,
        backward=block.recompute + block.backward,
        saved=0,
        small=0,
        fixed=block.fixed + block.inputs,
        forward_transient=block.forward_transient + max(0, alive - block.inputs),
        backward_transient=block.backward_transient + block.brought_back - block.inputs + block.small,
        first_operator=block.forward,
        held=0,
        parts=(),
    )


def _renumbered(cut: Sequence[Sequence[Block]]) -> list[Block]:
    """All units, with `Block.held_blocks` in units instead of blocks."""
    ends, count = [], 0
    for units in cut:
        count += len(units)
        ends.append(count - 1)
    found: list[Block] = []
    for number, units in enumerate(cut):
        for unit in units:
            place = len(found)

            def of(part: Block, number: int = number, place: int = place) -> Block:
                if not part.held:
                    return part
                end = ends[min(number + part.held_blocks, len(ends) - 1)]
                return replace(part, held_blocks=end - place)

            found.append(replace(of(unit), parts=tuple(map(of, unit.parts))))
    return found


def streamed(block: Block, *, backward_loads: int, **first: Any) -> Block:
    """Return the block with the transfers and the step of its state: loads of backward begin with its last part, and all else
    (`first`, fields of `Block`) is its first part's."""
    parts = block.parts
    if len(parts) > 1:
        parts = (replace(parts[0], **first), *parts[1:-1], replace(parts[-1], backward_loads=backward_loads))
    return replace(block, parts=parts, backward_loads=backward_loads, **first)


def runs(sizes: Sequence[int], most: int, first: int = 0) -> list[tuple[int, int]]:
    """Neighbours taken together, [begin, end), until each run has its share of the bytes: about `most` runs.

    Args:
        first: bytes of the first run beside these.
    """
    share = sum(sizes) / most if len(sizes) > most else 0.0
    found: list[tuple[int, int]] = []
    begin, size = 0, first
    for position, nbytes in enumerate(sizes):
        size += nbytes
        if size >= share or position + 1 == len(sizes):
            found.append((begin, position + 1))
            begin, size = position + 1, 0
    return found
