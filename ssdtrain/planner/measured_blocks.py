"""Blocks of a model from recorded steps, where these may be recomputed: what one of them saved (`read_steps`).

Blocks of one kind (class and shapes of parameters) take the same time: the median of all that were measured. Where blocks were
recomputed while steps were recorded, their saved bytes are those of the one of their kind that was not; where there is none (all
ranks recompute them), those of an earlier profile, by the ratio of their inputs.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from ssdtrain.planner.model.types import Block, Machine, Pass
from ssdtrain.planner.parts import UNITS, runs
from ssdtrain.planner.plans import SearchProblem, actions_for
from ssdtrain.planner.profile import join_regions, order_of, tape_bytes
from ssdtrain.planner.spans import BlockSpan
from ssdtrain.profile.passes import RegionTimes, StepRecord, TapeTimes, passed_at

if TYPE_CHECKING:
    from ssdtrain.planner.joint import StateCosts

__all__ = [
    "MeasuredBlock",
    "kind_of",
    "measured_blocks",
    "pieces",
    "problem_of",
    "read_steps",
    "set_parameter_shapes",
    "with_compressed",
    "with_encoded",
]

ALIKE = 0.9
"""Fraction of the bytes of the largest recorded forward that another one needs for its times to count."""

MOST_ENCODED = 0.95
"""Largest ratio of payloads to what they hold for which a block may stay encoded."""

PARTS = 16
"""Least number of parts of a block that the cost model distinguishes."""

TIMES = ("forward", "backward", "storing", "loading")
"""Times of a block that its parts share."""

_shapes: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], ...]] = WeakKeyDictionary()


@dataclass(frozen=True)
class MeasuredBlock:
    """A block, or what is saved between two of them.

    Attributes:
        name: of the block; "": outside of all.
        pure: it may be recomputed.
        recomputed: it was, when it was measured: its saved bytes are its inputs only.
        regions: of each of its parts, in order: the names of the modules that saved them, and their bytes. Empty: not known.
    """

    name: str
    block: Block
    pure: bool = False
    recomputed: bool = False
    regions: tuple[tuple[tuple[str, int], ...], ...] = ()

    def saved_by(self, action: str) -> int:
        """Bytes that it saves under an action of the plan."""
        block = self.block
        if action == "compress" and block.compressed is not None:
            block = block.compressed
        return block.inputs if action == "recompute" else block.saved + block.small


def kind_of(block: nn.Module) -> Hashable:
    """Equal for blocks that compute the same with other weights, as far as can be seen."""
    return type(block), _shapes.get(block) or tuple(tuple(one.shape) for one in block.parameters())


def set_parameter_shapes(block: nn.Module, shapes: Iterable[Sequence[int]]) -> None:
    """Make these the shapes of its parameters for `kind_of`, where the parameters are partitioned and do not have them."""
    _shapes[block] = tuple(map(tuple, shapes))


def pieces(
    tape: TapeTimes,
    spans: Sequence[BlockSpan],
    recomputed: frozenset[str],
    outside_small: int,
    least: int = 0,
) -> list[MeasuredBlock]:
    """The blocks of one recorded forward in order, and what is outside of them.

    Args:
        spans: of this forward, with timestamps that the device has passed.
        recomputed: names of blocks that were.
        outside_small: bytes of saved storages outside of blocks that are in no region.
        least: bytes; smaller regions never leave (`Block.small`).
    """
    found: list[MeasuredBlock] = []
    at, computed = 0, 0.0
    held = [
        {index: until for index, until in of.items() if tape.regions[index].nbytes >= least}
        for of in _held(spans)
    ]
    for number, span in enumerate(spans):
        if span.begin > at or not found:
            found.append(_outside(tape.regions[at : span.begin], len(found)))
        regions = tape.regions[span.begin : span.end]
        was = span.name in recomputed and span.plain
        began, last, ended = (passed_at(stamp) for stamp in span.timestamps or ())
        storing = sum(region.storing for region in regions)
        stall = sum(region.store_stall for region in regions) + storing
        forward = max(0.0, ended - began - stall)
        every = sum(region.nbytes for region in regions)
        saved = sum(region.nbytes for region in regions if region.nbytes >= least)
        again = min(forward, max(0.0, last - began - stall))
        parts, saving = _parts(span, regions, again, forward, held[number], least)
        block = Block(
            span.name,
            forward,
            sum(region.backward for region in regions),
            saved,
            recompute=again,
            inputs=every if was else span.inputs,
            small=span.small + every - saved,
            storing=storing,
            loading=sum(region.loading for region in regions),
            held=sum(tape.regions[index].nbytes for index in held[number]),
            held_blocks=max(held[number].values(), default=0),
            parts=parts,
        )
        found.append(MeasuredBlock(span.name, block, span.pure, was, saving))
        computed += forward
        at = span.end
    found.append(_outside(tape.regions[at:], len(found)))
    # A hook's time is that of what is computed before it: what blocks compute after their last one is not outside.
    rest = max(0.0, sum(region.forward for region in tape.regions) - computed)
    last_piece = found[-1]
    found[-1] = replace(last_piece, block=replace(last_piece.block, forward=rest, fixed=outside_small))
    return found


def _held(spans: Sequence[BlockSpan]) -> list[dict[int, int]]:
    """`BlockSpan.held` of each, in pieces instead of blocks. What is there at the end of the last block is taken to be there
    until the end of forward, but for that block's own."""
    places: list[int] = []
    count = at = 0
    for span in spans:
        count += span.begin > at or not count
        places.append(count)
        count, at = count + 1, span.end
    last = len(spans) - 1
    return [
        {
            index: (count if blocks and number + blocks == last else places[number + blocks]) - places[number]
            for index, blocks in span.held.items()
        }
        for number, span in enumerate(spans)
    ]


def _parts(
    span: BlockSpan,
    regions: Sequence[RegionTimes],
    again: float,
    forward: float,
    held_to: Mapping[int, int],
    least: int,
) -> tuple[tuple[Block, ...], tuple[tuple[tuple[str, int], ...], ...]]:
    """A block's regions, some neighbours taken together, and the time after the last one. And `MeasuredBlock.regions`.

    Args:
        again: seconds to the last region.
        forward: seconds of the whole block.
        held_to: by the index of a region, how many pieces later ends the one until whose end the program has it.
        least: see `pieces`.
    """
    if len(regions) < 2:
        return (), ()
    later = sum(region.forward for region in regions[1:])
    scale = min(1.0, again / later) if later else 1.0
    seconds = [max(0.0, again - later), *(scale * region.forward for region in regions[1:])]
    sizes, found = [region.nbytes for region in regions], list[Block]()
    saving: list[tuple[tuple[str, int], ...]] = []
    for begin, end in runs(sizes, PARTS, first=span.small):
        saving.append(tuple((region.name, region.nbytes) for region in regions[begin:end]))
        saved = sum(nbytes for nbytes in sizes[begin:end] if nbytes >= least)
        held = [index for index in range(begin, end) if span.begin + index in held_to]
        found.append(
            replace(
                join_regions(
                    regions[max(range(begin, end), key=sizes.__getitem__)].name, regions, begin, end
                ),
                forward=sum(seconds[begin:end]),
                saved=saved,
                small=sum(sizes[begin:end]) - saved + (0 if begin else span.small),
                first_operator=seconds[begin],
                held=sum(sizes[index] for index in held),
                held_blocks=max((held_to[span.begin + index] for index in held), default=0),
            )
        )
    found.append(Block(span.name, forward - again, 0.0, 0))
    return tuple(found), tuple(saving)


def _outside(regions: Sequence[RegionTimes], number: int) -> MeasuredBlock:
    seconds = sum(region.backward for region in regions)
    return MeasuredBlock(
        "", Block(f"outside {number}", 0.0, seconds, sum(region.nbytes for region in regions))
    )


def _scaled(whole: Block, **times: Any) -> Block:
    """`whole` with other `TIMES`, its parts in proportion."""

    def of(name: str, now: float) -> float:
        before = sum(getattr(part, name) for part in whole.parts)
        return now / before if before else 0.0

    scales = {name: of(name, now) for name, now in times.items()}
    parts = tuple(
        replace(part, **{name: scale * getattr(part, name) for name, scale in scales.items()})
        for part in whole.parts
    )
    return replace(whole, **times, parts=parts)


def measured_blocks(
    steps: Sequence[Sequence[MeasuredBlock]],
    kinds: Mapping[str, Hashable],
    earlier: Sequence[MeasuredBlock] = (),
) -> list[MeasuredBlock]:
    """The blocks by the medians of some steps.

    Args:
        steps: `pieces` of each, of one shape; at least one. Bytes are those of the last.
        kinds: of each block, by name.
        earlier: what an earlier profile returned, for kinds of which every block was recomputed in these steps.
    """
    latest = steps[-1]
    by_kind: dict[Hashable, list[MeasuredBlock]] = {}
    for step in steps:
        for piece in step:
            if piece.name and not piece.recomputed:
                by_kind.setdefault(kinds[piece.name], []).append(piece)
    before = {kinds[piece.name]: piece for piece in earlier if piece.name}
    found = []
    for index, piece in enumerate(latest):
        alike = by_kind.get(kinds[piece.name], []) if piece.name else [step[index] for step in steps]
        if not alike:
            like = before.get(kinds[piece.name])  # None: never measured, and nothing is decided about it
            found.append(piece if like is None else _grown(piece, like.block))
            continue
        times, recompute = (
            {what: statistics.median(getattr(one.block, what) for one in alike) for what in kind}
            for kind in (TIMES, ("recompute",))
        )
        block = replace(_scaled(piece.block, **times), **recompute)
        pure = piece.pure
        if piece.recomputed:
            like = alike[-1]
            saved = like.block.saved - like.block.inputs + piece.block.inputs
            block = replace(block, saved=saved, small=like.block.small, parts=())
            pure = pure and like.pure
        found.append(replace(piece, block=block, pure=pure))
    return found


def _grown(piece: MeasuredBlock, like: Block) -> MeasuredBlock:
    """A recomputed block as if it had been kept, by the ratio of its inputs to those of `like`, one of its kind in an earlier
    profile. Its forward was measured; its backward was not without the recomputation."""
    ratio = piece.block.inputs / like.inputs if like.inputs else 1.0
    block = replace(
        piece.block,
        saved=max(piece.block.inputs, int(ratio * like.saved)),
        small=int(ratio * like.small),
        backward=ratio * like.backward,
        parts=(),
    )
    return replace(piece, block=block)


def read_steps(
    records: Sequence[StepRecord],
    found: Mapping[int, tuple[Sequence[BlockSpan], int]],
    recomputed: frozenset[str],
    kinds: Mapping[str, Hashable],
    earlier: Sequence[MeasuredBlock] = (),
    *,
    least: int = 0,
) -> tuple[list[MeasuredBlock], list[Pass]]:
    """The blocks of the largest recorded forwards, and the passes of a step. Empty: no backward came.

    Args:
        records: that the device has passed.
        found: by serial number of the tape: spans, and small bytes outside.
        recomputed, least: see `pieces`.
        kinds, earlier: see `measured_blocks`.
    """
    steps: list[list[MeasuredBlock]] = []
    order: list[Pass] = []
    for record in records:
        used = [tape for tape in record.tapes() if tape.used]
        tapes = [tape for tape in used if tape.serial in found]
        if tapes:
            tape = max(tapes, key=tape_bytes)
            spans, small = found[tape.serial]
            steps.append(pieces(tape, spans, recomputed, small, least))
            order = order_of(record, [tape for tape in used if tape.regions])
    if not steps:
        return [], []
    steps.sort(key=_saved)
    names, enough = [piece.name for piece in steps[-1]], ALIKE * _saved(steps[-1])
    alike = [step for step in steps if [p.name for p in step] == names and _saved(step) >= enough]
    return measured_blocks(alike, kinds, earlier), order


def _saved(pieces: Sequence[MeasuredBlock]) -> int:
    return sum(piece.block.saved + piece.block.small for piece in pieces)


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
            smaller = _scaled(smaller, forward=forward, backward=backward)
            piece = replace(piece, block=replace(block, compressed=smaller))
        found.append(piece)
    return found


def with_encoded(block: Block, ratio: float, encode: float, decode: float) -> Block:
    """`block` with what it is where all that it saves stays encoded, if that is less.

    Args:
        ratio: bytes of payloads over those that it saves.
        encode, decode: seconds for a byte.
    """
    payloads = round(ratio * block.saved)
    if not block.saved or ratio > MOST_ENCODED:
        return block
    encoded = replace(
        block,
        forward=block.forward + encode * block.saved,
        recompute=decode * block.saved,
        inputs=payloads + block.small,
        held=0,
        compressed=None,
    )
    return replace(block, encoded=encoded)


def problem_of(
    measured: Sequence[MeasuredBlock],
    order: Sequence[Pass],
    machine: Machine,
    impure: Container[str],
    recomputed: Container[str] | None = None,
    state: StateCosts | None = None,
) -> SearchProblem:
    """What is searched for these blocks. Without a block that may be recomputed there is no such action; the same with compress
    and encode.

    Args:
        impure: names of blocks that must not run again.
        recomputed: names of the blocks that are recomputed, which is decided already; None: it is not.
        state: see `SearchProblem`.
    """
    again = [recomputed is not None and bool(piece.name) and piece.name in recomputed for piece in measured]
    pure = (
        again if recomputed is not None else [piece.pure and piece.name not in impure for piece in measured]
    )
    blocks = [
        piece.block if may else replace(piece.block, recompute=0.0)
        for piece, may in zip(measured, pure, strict=True)
    ]
    # A block that runs several times in a forward has one action for all of them.
    times = Counter(piece.name for piece in measured)
    fixed = frozenset(n for n, piece in enumerate(measured) if not piece.name or times[piece.name] > 1)
    compress, encode = (
        any(getattr(block, smaller) is not None for block in blocks) for smaller in ("compressed", "encoded")
    )
    actions = actions_for(machine, recompute=any(pure), compress=compress, encode=encode)
    never = frozenset(number for number, may in enumerate(pure) if not may)
    always = frozenset(number for number, must in enumerate(again) if must)
    # Of more blocks none would be cut, and the search has other uses for its time.
    by_parts = 2 * (len(blocks) - len(fixed)) <= UNITS
    return SearchProblem(
        [blocks], order, machine, actions, fixed - always, never, always, by_parts=by_parts, state=state
    )
