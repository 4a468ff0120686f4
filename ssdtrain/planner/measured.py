"""From what was measured in steps to what the cost model reads: blocks, the order of passes, bandwidths."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_high
from typing import NamedTuple

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.planner.recent import STEPS, RecentSteps
from ssdtrain.planner.step import Block, Link, Machine, Pass, Tier
from ssdtrain.profile.passes import StepRecord, TapeTimes
from ssdtrain.storage.metrics import StoreMetrics, TierMetrics

__all__ = [
    "Bandwidths",
    "Profile",
    "Rates",
    "RecentRates",
    "bound_stores",
    "host_tier",
    "measured_machine",
    "warn_of_no_writes",
]

logger = logging.getLogger("ssdtrain")

MOST_BLOCKS = 64
ALL_BEGUN = 1 << 30
"""Writes that are taken to be under way at once: a plan must not count on stores that are cancelled."""

AT_ONCE = 1e15
"""Bytes per second of what takes no time."""

VARIES = 1.05
"""Of the size of a recorded forward: another one that was larger by so much counts in what fits."""

MOST_PASSES = 512
"""Parts of blocks times passes that the cost model plays at a time."""


def warn_of_no_writes(steps: int) -> None:
    """After so many steps of a plan with tiers."""
    logger.warning(
        "ssdtrain.plan: nothing was written to the tiers in %d steps, because backward came before every write: nothing is "
        "offloaded",
        steps,
    )


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
            if known is None or _bytes(tape) > _bytes(known):
                largest[tape.chunk] = tape
        self.steps = 1
        if recent is not None and largest:
            recent.add(tapes)
            self.steps = min(recent.seen(tape) for tape in largest.values())
            largest = {chunk: recent.typical(tape) for chunk, tape in largest.items()}
        self.chunks = sorted(largest)
        self.order = _order(record, {tape.serial for tape in tapes}, self.chunks)
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
        """By how much the largest forward was larger than the one that was recorded: it has to fit too.

        Args:
            largest: bytes saved, by chunk.
        """
        found = 1.0
        for chunk, blocks in zip(self.chunks, self.blocks, strict=True):
            nbytes = sum(block.saved + block.fixed for block in blocks)
            if nbytes:
                found = max(found, largest.get(chunk, 0) / nbytes)
        return found if found > VARIES else 1.0


def _bytes(tape: TapeTimes) -> int:
    return sum(region.nbytes for region in tape.regions)


def _order(record: StepRecord, used: set[int], chunks: Sequence[int]) -> list[Pass]:
    """The passes of the tapes that were used, of so many tapes that those alive at once come to their steady
    number."""
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


def _blocks(tape: TapeTimes, most: int, finest: int) -> tuple[list[Block], list[tuple[int, int]]]:
    """At most `most` blocks that are decided about, played in at most `finest` parts: several transfers may be under way where
    one of them together would not fit into the buffers."""
    finer = _spans(tape, finest)
    blocks: list[Block] = []
    spans = _spans(tape, most)
    for begin, end in spans:
        inside = [
            (max(begin, first), min(end, last)) for first, last in finer if first < end and last > begin
        ]
        parts = tuple(_block(tape, first, last) for first, last in inside)
        whole = _block(tape, begin, end)
        blocks.append(replace(whole, parts=parts) if len(parts) > 1 else whole)
    return blocks, spans


def _spans(tape: TapeTimes, most: int) -> list[tuple[int, int]]:
    """Neighbouring regions taken together until each part has its share of the bytes."""
    share = _bytes(tape) / most if len(tape.regions) > most else 0.0
    spans: list[tuple[int, int]] = []
    begin = size = 0
    for position, region in enumerate(tape.regions):
        size += region.nbytes
        if size >= share or position + 1 == len(tape.regions):
            spans.append((begin, position + 1))
            begin, size = position + 1, 0
    return spans


def _block(tape: TapeTimes, begin: int, end: int) -> Block:
    regions = tape.regions[begin:end]
    forward, backward = sum(one.forward for one in regions), sum(one.backward for one in regions)
    fixed = sum(one.nbytes for one in regions if one.stays)
    saved = sum(one.nbytes for one in regions) - fixed
    # A store begins in the hook of what is saved next.
    storing = sum(one.storing for one in tape.regions[begin + 1 : end + 1])
    loading = sum(one.loading for one in regions)
    first, following = regions[0], tape.regions[end].operator if end < len(tape.regions) else -1
    return Block(
        first.name,
        forward,
        backward,
        saved,
        fixed=fixed,
        first_operator=first.forward,
        storing=storing,
        loading=loading,
        continues=regions[-1].operator == following != -1,
    )


class Rates(NamedTuple):
    """Bytes per second of all tiers together; None where nothing was moved."""

    write: float | None
    read: float | None

    def or_else(self, other: Rates) -> Rates:
        """With those of `other` where nothing was moved."""
        return Rates(self.write or other.write, self.read or other.read)

    def after(self, before: Rates) -> Rates:
        """With those of `before` where nothing was moved. Where only writes were measured, reads are taken to have changed as
        much: what backward needs so soon that it comes from memory is not read."""
        read = before.read
        if self.write and before.write and read:
            read *= self.write / before.write
        return Rates(self.write or before.write, self.read or read)


class RecentRates:
    """The medians of the latest `STEPS` steps, which a plan counts on: in one of them the drives may have been busy otherwise."""

    def __init__(self) -> None:
        self._steps: deque[Rates] = deque(maxlen=STEPS)
        self._latest = Rates(None, None)

    def with_step(self, measured: Rates) -> Rates:
        """The medians when a step has ended. For what was not moved in it see `Rates.after`."""
        self._latest = measured.after(self._latest)
        self._steps.append(self._latest)
        return Rates(*map(_median, zip(*self._steps, strict=True)))


def _median(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate]
    return median_high(known) if known else None


class Bandwidths:
    """Of tiers under load, from the store's counters: bytes over the seconds in which at least one
    transfer was under way.

    Args:
        drives, host: count these.
    """

    def __init__(self, *, drives: bool = True, host: bool = True) -> None:
        self._drives, self._host = drives, host
        self._before: dict[str, TierMetrics] = {}

    def since(self, store: StoreMetrics) -> Rates:
        """The rates since the last call."""
        tiers = list(store.drives) if self._drives else []
        if self._host and store.host is not None:
            tiers.append(store.host)
        written = read = 0.0
        for tier in tiers:
            old = self._before.get(tier.path)
            if old is not None:
                written += _rate(
                    tier.bytes_written - old.bytes_written, tier.write_seconds - old.write_seconds
                )
                read += _rate(tier.bytes_read - old.bytes_read, tier.read_seconds - old.read_seconds)
        self._before = {tier.path: tier for tier in tiers}
        return Rates(written or None, read or None)


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if nbytes and seconds > 0 else 0.0


def measured_machine(
    engine: OffloadEngine,
    rates: Rates,
    link: tuple[float, float] | None,
    margin: float = 1.0,
    host: Tier | None = None,
) -> Machine:
    """The machine as measured: a tier "ssd" of these rates, and the limits of the engine.

    Args:
        rates: of the tiers that have no tier of their own in the model.
        link: bytes per second between device and host, each way; None: a CPU.
        margin: part of the bandwidths that is counted on.
        host: a second tier; see `host_tier`.
    """
    # Copies into a pinned host tier take the time of the link alone.
    write = rates.write or (link[0] if link is not None else 1.0)
    read = rates.read or write  # everything so far was taken from its staging buffer
    return Machine(
        (Tier("ssd", margin * write, margin * read, depth=ALL_BEGUN), *([host] if host is not None else [])),
        Link(*(margin * rate for rate in link)) if link is not None else None,
        engine.mover.stores.limit,
        max(engine.prefetcher.limit, 1),
        max(engine.mover.departures.limit, 1),
        engine.buffers.counted_bytes,
        engine.mover.batch_bytes if link is None else 0,
        copies=engine.device.copy_bandwidth(),
        in_order=engine.mover.stores.in_order,
    )


def host_tier(capacity: int, rates: Rates, link: tuple[float, float] | None) -> Tier:
    """Host memory of `capacity` bytes, in front of drives.

    Args:
        rates: measured.
        link: as of `measured_machine`. Behind a link the memory is pinned: a transfer is over with its copy.
    """
    write, read = (AT_ONCE, AT_ONCE) if link is not None else (rates.write or AT_ONCE, rates.read or AT_ONCE)
    return Tier("host", write, read, depth=ALL_BEGUN, capacity=capacity)


def bound_stores(engine: OffloadEngine, link: tuple[float, float] | None, tape_bytes: int) -> None:
    """On a CPU (`link` is None) let tensors leave in order (`offload.in_flight`), with at most two of the largest tensors or a
    sixteenth of a forward in flight: they are a part of the peak. Called at the end of each step that is profiled: the
    bound follows the size of forwards, up and down.

    Args:
        tape_bytes: saved by the largest of the latest forwards.
    """
    if link is None and tape_bytes:
        engine.mover.stores.bound = max(2 * engine.prefetcher.largest, tape_bytes // 16)
