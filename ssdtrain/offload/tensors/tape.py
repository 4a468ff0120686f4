"""The regions that one forward of one microbatch on one model chunk saved, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ssdtrain.offload.tensors.region import Region

if TYPE_CHECKING:
    from ssdtrain.offload.checks.proof import Proof

FAR = 8
"""Places of a tape between a tensor and one that shares its bytes, from which on the latter has a place of its own."""


class Tape:
    """Backward reads a tape from its end. A pipeline has several alive.

    Args:
        chunk: the model chunk (virtual pipeline stage).
        microbatch: the microbatch; (chunk, microbatch) names the tape while it is alive.
        keep: nothing of this tape leaves memory, because its backward follows at once.
    """

    __slots__ = (
        "__weakref__",
        "chunk",
        "cursor",
        "joined",
        "keep",
        "largest_operator",
        "microbatch",
        "nbytes",
        "pass_number",
        "regions",
        "second_operator",
        "unproven",
        "unstored",
    )

    def __init__(self, chunk: int = 0, microbatch: int = 0, *, keep: bool = False) -> None:
        self.chunk = chunk
        self.microbatch = microbatch
        self.keep = keep
        self.nbytes = 0  # bytes of all its regions, kept ones included
        self.largest_operator = self.second_operator = 0  # bytes: of those that save most, what they stored
        self.cursor: int | None = None  # backward has come down to this index; None: not begun
        self.pass_number = 0  # backward passes begun: retain_graph makes more than one
        self.regions: list[Region | None] = []
        # Place of a region: the place where it was saved once more, far from there (an encoder's output, a table that all layers
        # use). Backward asks for it there first.
        self.joined: dict[int, int] = {}
        # Saved by one operator, and to be stored when that has ended. See Note: [After the operator]
        self.unstored: list[Region] = []
        self.unproven: list[tuple[int, Any, Proof]] = []  # see `Prover.saved`

    def remove(self, region: Region) -> None:
        """Forget a released region: the tape must not keep its last reference."""
        self.regions[region.index] = None

    def begin(self) -> None:
        """A backward is about to begin; after an earlier one (retain_graph) it is a new pass from the end."""
        if self.cursor is not None:
            self.pass_number += 1
            self.cursor = len(self.regions)

    def join(self, region: Region) -> None:
        """`region` was saved once more, and what is saved next follows far behind it."""
        self.joined[region.index] = len(self.regions) - 1

    def place(self, region: Region) -> int:
        """Where backward is when it asks for `region` first."""
        return self.joined.get(region.index, region.index)

    def asked(self, region: Region, last_pass: int | None) -> None:
        """Backward asks for a tensor of `region`, which it had in pass `last_pass`, if it is not None."""
        # Only the tensor of a region that was saved first says where backward is. Which one is asked for again is not known.
        if last_pass is None:
            if region.pending_unpacks <= 1:
                self.reached(region.index)
            return
        if region.shared and last_pass == self.pass_number and region.pending_unpacks <= 0:
            self.pass_number += 1  # it has had all of them in this one
        if region.index not in self.joined:
            self.reached(region.index, again=True)

    def reached(self, index: int, *, again: bool = False) -> None:
        """Backward asks for what was saved of region `index` first; `again`: it had it before, so this is a new pass."""
        cursor = self.cursor
        if cursor is None or index < cursor:
            self.cursor = index
        elif again and index > cursor:
            self.pass_number += 1
            self.cursor = index

    @property
    def end(self) -> int:
        """Regions from this index on are passed: backward has had them, or will not ask for them. What the operator at the
        cursor saved is not: backward asks for it in the order in which it was saved."""
        regions, end = self.regions, self.cursor
        count = len(regions)
        if end is None or end >= count:
            return count
        here = other = regions[end]
        while here is not None and other is not None and other.operator == here.operator:
            end += 1
            other = regions[end] if end < count else None
        return end

    def passed(self, region: Region) -> bool:
        """Return whether backward is past `region`, or that is released."""
        index, cursor = region.index, self.cursor
        return (cursor is not None and index >= cursor and index >= self.end) or self.regions[index] is None

    def coming(self) -> Iterator[Region]:
        """Regions that backward has not had, in the order in which it will ask: operators from the last one, and what each of
        them saved in the order in which it was saved. A region that was saved again far from its place comes there too."""
        regions, now = self.regions, self.pass_number
        joined: dict[int, list[int]] = {}
        for index, place in self.joined.items():
            joined.setdefault(place, []).append(index)
        saved: list[Region] = []  # by one operator, the last one first
        operator = -1
        for index in range(self.end - 1, -1, -1):
            region = regions[index]
            if joined and index in joined:
                while saved:
                    yield saved.pop()
                for other in joined[index]:
                    if (again := regions[other]) is not None and again.last_pass != now:
                        yield again
            if region is None or (region.last_pass == now and not region.pending_unpacks):
                continue
            if region.operator != operator:
                while saved:
                    yield saved.pop()
                operator = region.operator
            saved.append(region)
        while saved:
            yield saved.pop()

    def __repr__(self) -> str:
        live = sum(region is not None for region in self.regions)
        return f"Tape(chunk={self.chunk}, microbatch={self.microbatch}, regions={live}/{len(self.regions)})"
