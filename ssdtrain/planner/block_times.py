"""From recorded steps to the model's blocks as the cost model reads them, where blocks may be recomputed.

Blocks of one kind (class and shapes of parameters) take the same time: the median of all that were measured. Where blocks were
recomputed while steps were recorded, their saved bytes are those of the one of their kind that was not.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ssdtrain.planner.step import Block
from ssdtrain.profile.passes import RegionTimes, TapeTimes
from ssdtrain.profile.spans import Span

__all__ = ["MeasuredBlock", "kind_of", "measured_blocks", "pieces", "with_compressed"]


PARTS = 8
"""Of a block, that the cost model distinguishes."""


@dataclass(frozen=True)
class MeasuredBlock:
    """A block, or what is saved between two of them.

    Attributes:
        name: of the block; "": outside of all.
        pure: it may be recomputed.
        recomputed: it was, when it was measured: its saved bytes are its inputs only.
    """

    name: str
    block: Block
    pure: bool = False
    recomputed: bool = False

    def saved_by(self, action: str) -> int:
        """Bytes that it saves under an action of the plan."""
        if action == "compress" and self.block.compressed is not None:
            return self.block.compressed.saved
        return self.block.inputs if action == "recompute" else self.block.saved


def kind_of(block: nn.Module) -> Hashable:
    """Equal for blocks that compute the same with other weights, as far as can be seen."""
    return type(block), tuple(tuple(parameter.shape) for parameter in block.parameters())


def pieces(
    tape: TapeTimes, spans: Sequence[Span], recomputed: frozenset[str], outside_small: int
) -> list[MeasuredBlock]:
    """The blocks of one recorded forward in order, and what is outside of them.

    Args:
        spans: of this forward, with timestamps that the device has passed.
        recomputed: names of blocks that were.
        outside_small: bytes of saved storages outside of blocks that are in no region.
    """
    found: list[MeasuredBlock] = []
    at, computed = 0, 0.0
    for span in spans:
        if span.begin > at or not found:
            found.append(_outside(tape.regions[at : span.begin], len(found)))
        regions = tape.regions[span.begin : span.end]
        was = span.name in recomputed and span.plain
        began, last, ended = (stamp.seconds() for stamp in span.timestamps or ())
        stall = sum(region.store_stall for region in regions)
        forward = max(0.0, ended - began - stall)
        saved = sum(region.nbytes for region in regions)
        again = min(forward, max(0.0, last - began - stall))
        block = Block(
            span.name,
            forward,
            sum(region.backward for region in regions),
            saved,
            recompute=again,
            inputs=saved if was else span.inputs,
            small=span.small,
            parts=_parts(span.name, regions, again, forward, span.small),
        )
        found.append(MeasuredBlock(span.name, block, span.pure, was))
        computed += forward
        at = span.end
    found.append(_outside(tape.regions[at:], len(found)))
    # A hook's time is that of what is computed before it: what blocks compute after their last one is not outside.
    rest = max(0.0, sum(region.forward for region in tape.regions) - computed)
    last_piece = found[-1]
    found[-1] = replace(last_piece, block=replace(last_piece.block, forward=rest, fixed=outside_small))
    return found


def _parts(
    name: str, regions: Sequence[RegionTimes], again: float, forward: float, small: int
) -> tuple[Block, ...]:
    """A block's regions, some neighbours taken together, and the time after the last one.

    Args:
        again: seconds to the last region.
        forward: seconds of the whole block.
    """
    if len(regions) < 2:
        return ()
    share = sum(region.nbytes for region in regions) / PARTS
    later = sum(region.forward for region in regions[1:])
    scale = min(1.0, again / later) if later else 1.0
    found: list[Block] = []
    seconds, backward, nbytes = max(0.0, again - later), 0.0, 0
    first: float | None = None
    for number, region in enumerate(regions):
        seconds += scale * region.forward if number else 0.0
        first = seconds if first is None else first
        backward += region.backward
        nbytes += region.nbytes
        if nbytes >= share or number + 1 == len(regions):
            least = 0 if found else small
            found.append(Block(name, seconds, backward, nbytes, small=least, first_operator=first))
            seconds, backward, nbytes, first = 0.0, 0.0, 0, None
    found.append(Block(name, forward - again, 0.0, 0))
    return tuple(found)


def _scaled(parts: Sequence[Block], forward: float, backward: float) -> tuple[Block, ...]:
    """Parts with other times in all."""
    before, after = sum(part.forward for part in parts), sum(part.backward for part in parts)
    return tuple(
        replace(
            part,
            forward=part.forward * forward / before if before else 0.0,
            backward=part.backward * backward / after if after else 0.0,
        )
        for part in parts
    )


def _outside(regions: Sequence[RegionTimes], number: int) -> MeasuredBlock:
    seconds = sum(region.backward for region in regions)
    return MeasuredBlock(
        "", Block(f"outside {number}", 0.0, seconds, sum(region.nbytes for region in regions))
    )


def measured_blocks(
    steps: Sequence[Sequence[MeasuredBlock]], kinds: Mapping[str, Hashable]
) -> list[MeasuredBlock]:
    """The blocks by the medians of some steps.

    Args:
        steps: `pieces` of each, of one shape; at least one. Bytes are those of the last.
        kinds: of each block, by name.
    """
    latest = steps[-1]
    by_kind: dict[Hashable, list[MeasuredBlock]] = {}
    for step in steps:
        for piece in step:
            if piece.name and not piece.recomputed:
                by_kind.setdefault(kinds[piece.name], []).append(piece)
    found = []
    for index, piece in enumerate(latest):
        alike = by_kind.get(kinds[piece.name], []) if piece.name else [step[index] for step in steps]
        if not alike:
            found.append(piece)  # never measured: a block that nothing is decided about
            continue
        forward, backward, recompute = (
            statistics.median(getattr(one.block, what) for one in alike)
            for what in ("forward", "backward", "recompute")
        )
        parts = _scaled(piece.block.parts, forward, backward)
        block = replace(piece.block, forward=forward, backward=backward, recompute=recompute, parts=parts)
        pure = piece.pure
        if piece.recomputed:
            like = alike[-1]
            saved = like.block.saved - like.block.inputs + piece.block.inputs
            block = replace(block, saved=saved, small=like.block.small, parts=())
            pure = pure and like.pure
        found.append(MeasuredBlock(piece.name, block, pure, piece.recomputed))
    return found


def with_compressed(
    plain: Sequence[MeasuredBlock], compressed: Sequence[MeasuredBlock]
) -> list[MeasuredBlock]:
    """The blocks of `plain`, each with what it is with compressed inputs, where it saves fewer bytes then. Its times are at least
    those without: a difference of noise must not make what is lossy the faster choice.

    Args:
        compressed: the same forward, measured while linear layers kept compressed inputs.
    """
    if [piece.name for piece in plain] != [piece.name for piece in compressed]:
        return list(plain)
    found = []
    for piece, other in zip(plain, compressed, strict=True):
        block, smaller = piece.block, other.block
        if piece.name and smaller.saved + smaller.small < block.saved + block.small:
            forward, backward = max(block.forward, smaller.forward), max(block.backward, smaller.backward)
            parts = _scaled(smaller.parts, forward, backward)
            smaller = replace(smaller, forward=forward, backward=backward, parts=parts)
            piece = replace(piece, block=replace(block, compressed=smaller))
        found.append(piece)
    return found
