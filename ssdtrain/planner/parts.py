"""Blocks as the cost model plays them: in their parts where they are offloaded, and compressed where that was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from ssdtrain.planner.step import DEVICE, Block, BlockTimes, Choice

__all__ = ["expanded", "first_operator", "folded", "largest_two"]


def expanded(
    chunks: Sequence[Sequence[Block]], choices: Sequence[Sequence[Choice]]
) -> tuple[list[list[Block]], list[list[Choice]], list[list[int]]]:
    """Blocks in their parts, where any is offloaded and transfers go on between the parts; compressed ones as they are then; and
    of which block each is. A block that is recomputed is one."""
    all_blocks, all_choices, all_owners = [], [], []
    for chunk, chosen in zip(chunks, choices, strict=True):
        blocks: list[Block] = []
        each: list[Choice] = []
        owners: list[int] = []
        moving = any(choice.tier != DEVICE for choice in chosen)
        for number, (block, choice) in enumerate(zip(chunk, chosen, strict=True)):
            if choice.compress and block.compressed is not None:
                block = block.compressed
            parts = block.parts if moving and block.parts and not choice.recompute else (block,)
            blocks += parts
            each += [choice] * len(parts)
            owners += [number] * len(parts)
        all_blocks.append(blocks)
        all_choices.append(each)
        all_owners.append(owners)
    return all_blocks, all_choices, all_owners


def folded(times: Sequence[BlockTimes], owners: Sequence[int]) -> list[BlockTimes]:
    """The times of whole blocks, from those of `expanded`."""
    found: list[BlockTimes] = [BlockTimes() for _ in range(owners[-1] + 1 if owners else 0)]
    for one, owner in zip(times, owners, strict=True):
        found[owner].store_stall += one.store_stall
        found[owner].load_stall += one.load_stall
        found[owner].stored += one.stored
    return found


def first_operator(block: Block, choice: Choice) -> float:
    """Seconds from the beginning of its forward to its first hook."""
    if choice.recompute:
        return block.forward
    return block.parts[0].first_operator if block.parts else block.first_operator


def largest_two(block: Block) -> int:
    """Bytes: what a forward that saves nothing has of `Block.saved` and `Block.small` at a time, the input and the output of an
    operator."""
    return sum(sorted((part.saved + part.small for part in block.parts or (block,)), reverse=True)[:2])
