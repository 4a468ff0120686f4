"""Turns recorded steps into what the cost model reads, by regions: a block is a run of neighbouring regions of a tape.

By blocks of the model: `ssdtrain.planner.measured_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ssdtrain.planner.model.types import KEPT, Block, Choice, Machine, Pass
from ssdtrain.planner.parts import runs
from ssdtrain.planner.plans import SHARES, SearchProblem
from ssdtrain.planner.recent import RecentSteps
from ssdtrain.profile.passes import RegionTimes, StepRecord, TapeTimes

if TYPE_CHECKING:
    pass

__all__ = ["Profile", "join_regions", "order_of", "regions_problem", "tape_bytes"]

MOST_BLOCKS = 64
VARIES = 1.05
"""Ratio to the size of a recorded forward from which a larger one counts in what fits."""

MOST_PASSES = 512
"""Parts of blocks times passes that the cost model plays at a time."""


def regions_problem(
    chunks: Sequence[Sequence[Block]], order: Sequence[Pass], machine: Machine, beside: int = 0
) -> SearchProblem:
    """What is searched for blocks that are kept or offloaded. A step begins while transfers of the one before are under way.

    Args:
        beside: see `SearchProblem`.
    """
    several = len(machine.tiers) > 1
    actions, parts = {"keep": KEPT}, {}
    for tier in machine.tiers:
        actions[f"offload to {tier.name}" if several else "offload"] = Choice(tier.name)
    if machine.copies is not None and machine.tiers:
        to = f" to {machine.tiers[0].name}" if several else ""
        for share in range(1, SHARES):
            part = Choice(machine.tiers[0].name, share=share / SHARES)
            parts[f"offload {part.share:.1%}{to}"] = part
    return SearchProblem(chunks, order, machine, actions, steps=2, parts=parts, beside=beside)


class Profile:
    """A recorded step.

    Args:
        record: of a step that the device has passed.
        recent: the steps before it, which this one is added to: times are of all of them.

    Attributes:
        chunks: the model chunks seen, in the order in which `blocks` has them.
        blocks: neighbouring regions taken together, so that there are at most 64 for a chunk, with regions as
        their parts; of its largest tape. spans: the positions on the tape that each block covers, [begin, end).
        order: the passes of the step; only the first microbatches of many. stall: seconds that the device waited
        for transfers. seconds: what it computed and waited, in all. steps: that times are medians of. movable: the
        positions on the tape of the first chunk that a plan may offload, those first whose writes say most of a drive: of what
        backward needs late the largest.
    """

    def __init__(self, record: StepRecord, recent: RecentSteps | None = None) -> None:
        tapes = [tape for tape in record.tapes() if tape.regions and tape.used]
        largest: dict[int, TapeTimes] = {}
        for tape in tapes:
            known = largest.get(tape.chunk)
            if known is None or tape_bytes(tape) > tape_bytes(known):
                largest[tape.chunk] = tape
        self.steps = 1
        if recent is not None and largest:
            recent.add(tapes)
            self.steps = min(recent.seen(tape) for tape in largest.values())
            largest = {chunk: recent.typical(tape) for chunk, tape in largest.items()}
        self.chunks = sorted(largest)
        self.order = order_of(record, tapes)
        finest = max(8, MOST_PASSES // max(1, len(self.order)))
        self.blocks: list[list[Block]] = []
        self.spans: list[list[tuple[int, int]]] = []
        for chunk in self.chunks:
            blocks, spans = _blocks(largest[chunk], min(MOST_BLOCKS, finest), finest)
            self.blocks.append(blocks)
            self.spans.append(spans)
        first = largest[self.chunks[0]].regions if largest else ()
        self.movable = [position for position, region in enumerate(first) if not region.stays]
        half = len(first) // 2
        self.movable.sort(key=lambda position: (position >= half, -first[position].nbytes))
        regions = [region for tape in tapes for region in tape.regions]
        self.stall = sum(region.store_stall + region.load_stall for region in regions)
        self.seconds = self.stall + sum(
            one.forward + one.backward + one.storing + one.loading for one in regions
        )

    def outgrown(self, largest: Mapping[int, int]) -> float:
        """Return the ratio of the largest forward to the one that was recorded: it has to fit too.

        Args:
            largest: bytes saved, by chunk.
        """
        found = 1.0
        for chunk, blocks in zip(self.chunks, self.blocks, strict=True):
            nbytes = sum(block.saved + block.fixed for block in blocks)
            if nbytes:
                found = max(found, largest.get(chunk, 0) / nbytes)
        return found if found > VARIES else 1.0


def _blocks(tape: TapeTimes, most: int, finest: int) -> tuple[list[Block], list[tuple[int, int]]]:
    """Make at most `most` blocks that are decided about, played in at most `finest` parts: several transfers may be under way
    where one of them together would not fit into the buffers."""
    sizes = [region.nbytes for region in tape.regions]
    finer, spans = runs(sizes, finest), runs(sizes, most)
    blocks: list[Block] = []
    for begin, end in spans:
        inside = [
            (max(begin, first), min(end, last)) for first, last in finer if first < end and last > begin
        ]
        parts = tuple(_block(tape.regions, first, last) for first, last in inside)
        whole = _block(tape.regions, begin, end)
        blocks.append(replace(whole, parts=parts) if len(parts) > 1 else whole)
    return blocks, spans


def _block(regions: Sequence[RegionTimes], begin: int, end: int) -> Block:
    """A store begins in the hook of what is saved next."""
    whole = join_regions(regions[begin].name, regions, begin, end)
    fixed = sum(region.nbytes for region in regions[begin:end] if region.stays)
    storing = sum(region.storing for region in regions[begin + 1 : end + 1])
    return replace(whole, saved=whole.saved - fixed, fixed=fixed, storing=storing)


def tape_bytes(tape: TapeTimes) -> int:
    """Return the bytes of all its regions."""
    return sum(region.nbytes for region in tape.regions)


def order_of(record: StepRecord, tapes: Sequence[TapeTimes]) -> list[Pass]:
    """List the passes of these tapes, of so many tapes that those alive at once come to their steady number."""
    used, chunks = {tape.serial for tape in tapes}, sorted({tape.chunk for tape in tapes})
    alive = most = 0
    for kind, serial, _ in record.order:
        if serial in used:
            alive += 1 if kind == "forward" else -1
            most = max(most, alive)
    first = {serial for serial in sorted(used)[: most + 3]}
    return [
        Pass("forward" if kind == "forward" else "backward", serial, chunks.index(chunk))
        for kind, serial, chunk in record.order
        if serial in first
    ]


def join_regions(name: str, regions: Sequence[RegionTimes], begin: int, end: int) -> Block:
    """Make one block of the regions [begin, end)."""
    inside, following = regions[begin:end], regions[end].operator if end < len(regions) else -1
    return Block(
        name,
        sum(region.forward for region in inside),
        sum(region.backward for region in inside),
        sum(region.nbytes for region in inside),
        first_operator=inside[0].forward,
        storing=sum(region.storing for region in inside),
        loading=sum(region.loading for region in inside),
        continues=inside[-1].operator == following != -1,
    )
