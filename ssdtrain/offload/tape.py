"""The regions that one forward of one microbatch on one model chunk saved, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ssdtrain.offload.region import Region

if TYPE_CHECKING:
    from ssdtrain.offload.proof import Proof

__all__ = ["Tape"]


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
        # Saved by one operator, and to be stored when that has ended. See Note: [After the operator]
        self.unstored: list[Region] = []
        self.unproven: list[tuple[int, Any, Proof]] = []  # see `Prover.saved`

    def append(self, region: Region) -> None:
        """Add a region that was saved just now, to be stored or kept."""
        self.regions.append(region)
        self.nbytes += region.nbytes

    def remove(self, region: Region) -> None:
        """Forget a released region: the tape must not keep its last reference."""
        self.regions[region.index] = None

    def begin(self) -> None:
        """A backward is about to begin; after an earlier one (retain_graph) it is a new pass from the end."""
        if self.cursor is not None:
            self.pass_number += 1
            self.cursor = len(self.regions)

    def reached(self, index: int, *, again: bool) -> None:
        """Backward asks for region `index`; `again`: a handle that was unpacked before, so this is a new pass."""
        if self.cursor is None:
            self.cursor = len(self.regions)
        if again and index > self.cursor:
            self.pass_number += 1
            self.cursor = index
        self.cursor = min(self.cursor, index)

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

    def coming(self) -> Iterator[Region]:
        """Regions that backward has not had, in the order in which it will ask: operators from the last one, and what each of
        them saved in the order in which it was saved."""
        operator: list[Region] = []
        for index in range(self.end - 1, -1, -1):
            region = self.regions[index]
            if region is None or (region.last_pass == self.pass_number and not region.pending_unpacks):
                continue
            if operator and region.operator != operator[-1].operator:
                yield from reversed(operator)
                operator.clear()
            operator.append(region)
        yield from reversed(operator)

    def __repr__(self) -> str:
        live = sum(region is not None for region in self.regions)
        return f"Tape(chunk={self.chunk}, microbatch={self.microbatch}, regions={live}/{len(self.regions)})"
