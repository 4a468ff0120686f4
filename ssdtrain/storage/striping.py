"""The drives of a store, and how slots are divided among them: by how fast each was measured to be.

Note: [Divided by speed]
    What lies on the drives is kept in proportion to their speed, so that all of them end what forward writes together, and what
    backward reads: a slot goes to the drive that could write and read back all that it then holds in the least time, and the
    parts of a slot that lies on several drives are in proportion to their speed. Drives that are equal, or were not measured
    yet, hold the same number of bytes.

    A drive so slow that it gets nothing is not measured again. Therefore an old measurement is trusted less and less, until
    the drive gets a slot and is measured anew: one that has recovered has its share again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ssdtrain.storage import memory
from ssdtrain.storage.memory import ALIGNMENT
from ssdtrain.storage.pieces import image_bytes
from ssdtrain.storage.slab import Slab

logger = logging.getLogger(__name__)

WINDOW = 8
"""Slots per drive between two measurements. About four are under way at a time, whose bytes are not counted yet."""

WEIGHT_OF_OLD = 0.75
"""Weight of what was measured before a window, against what is measured in it."""

LEAST_WINDOWS = 3
"""Before the drives are distinguished."""

FORGOTTEN = 0.8
"""Factor by which a drive without transfers is taken to be faster, for each window in which others had some."""


class _Measured:
    """Recent bytes and seconds of one drive in one direction."""

    __slots__ = ("nbytes", "seconds")

    def __init__(self) -> None:
        self.nbytes = self.seconds = 0.0

    @property
    def cost(self) -> float:
        """Seconds per byte; 0: unknown."""
        return self.seconds / max(self.nbytes, 1.0)

    def add(self, nbytes: float, seconds: float, windows: float) -> None:
        """The drives have moved bytes of so many windows in this direction, this one `nbytes` in `seconds`."""
        weight = WEIGHT_OF_OLD**windows
        self.nbytes = weight * self.nbytes + nbytes
        self.seconds = weight * self.seconds * (1.0 if seconds else FORGOTTEN**windows) + seconds


class StripedDrives:
    """The spill files of one rank. Not thread-safe: the store calls it while holding its lock.

    Args:
        slabs: one for each drive, in the order of their indices.
        stripe: bytes above which a slot is spread over several drives.
        pattern: what freed space is overwritten with (tests); None: nothing.
    """

    def __init__(self, slabs: Sequence[Slab], stripe: int, pattern: memory.Map | None) -> None:
        self.slabs = slabs
        self._single = slabs[0] if len(slabs) == 1 else None
        self.costs = [1.0] * len(slabs)
        """Seconds per byte written and read again, relative to the fastest drive."""
        self._stripe = stripe
        self._pattern = pattern
        self._slots = self._bytes = 0  # reserved in this window
        self._windows = 0
        self._counters: list[tuple[int, int, float, float]] = []
        self._measured = [[_Measured() for _ in slabs] for _ in range(2)]  # [direction][drive]

    def reserve(self, nbytes: int) -> tuple[int, ...] | None:
        """Extents for a slot of `nbytes`, on one drive per stripe; on fewer if some are full. None: there is no room."""
        image = image_bytes(nbytes)
        if self._single is not None:
            offset = self._take(self._single, image)
            return None if offset is None else (0, offset, image)
        self._slots += 1
        self._bytes += nbytes
        most = max(1, -(-nbytes // self._stripe))
        found = self._spread(image, most, self.costs)
        if found is None and max(self.costs, default=1.0) > 1:
            # A fast drive may have less room than its share.
            found = self._spread(image, most, [1.0] * len(self.slabs))
        return found

    def release(self, extents: Sequence[int]) -> None:
        for at in range(0, len(extents), 3):
            slab = self.slabs[extents[at]]
            length = slab.release(extents[at + 1])
            if self._pattern is not None:
                slab.poison(extents[at + 1], length, memory.view(self._pattern.address, self._pattern.nbytes))

    def retire(self, slab: Slab, error: BaseException) -> None:
        """Put nothing more on a drive. Warns once."""
        if slab.retired:
            return
        slab.retired = True
        left = sum(not other.retired for other in self.slabs)
        text = "the drive behind %s is not used any more after an error: %s; %d of %d drives remain"
        logger.warning(text, slab.directory, error, left, len(self.slabs))

    @property
    def window_over(self) -> bool:
        """`observe` is to be called."""
        return self._slots >= WINDOW * len(self.slabs)

    def observe(self, queues: Sequence[tuple[int, int, float, float]]) -> None:
        """A window is over. See Note: [Divided by speed].

        Args:
            queues: of `Pool.counters`, a row for each drive first.
        """
        before, self._counters = self._counters, list(queues[: len(self.slabs)])
        reserved, self._slots, self._bytes = max(self._bytes, 1), 0, 0
        if not before:
            return
        self._windows += 1
        totals = [0.0] * len(self.slabs)
        for direction, drives in enumerate(self._measured):
            moved = [
                (new[direction] - old[direction], new[2 + direction] - old[2 + direction])
                for old, new in zip(before, self._counters, strict=True)
            ]
            windows = sum(nbytes for nbytes, _ in moved) / reserved
            for drive, latest in zip(drives, moved, strict=True):
                drive.add(*latest, windows)
            busy = [drive.cost for drive, (_, seconds) in zip(drives, moved, strict=True) if seconds > 0]
            least = min(busy or [drive.cost for drive in drives])
            totals = [total + max(drive.cost, least) for total, drive in zip(totals, drives, strict=True)]
        fastest = min(totals)
        if fastest > 0 and self._windows >= LEAST_WINDOWS:
            self.costs = [total / fastest for total in totals]

    def _spread(self, image: int, most: int, costs: Sequence[float]) -> tuple[int, ...] | None:
        """An image on at most so many drives, of those that have room."""
        drives = [slab for slab in self.slabs if not slab.retired]
        share = image / max(1, min(most, len(drives)))
        drives.sort(key=lambda slab: (slab.used + share) * costs[slab.index])
        while drives:
            chosen = drives[:most]
            extents: list[int] = []
            for slab, length in zip(
                chosen, _divided(image, [costs[slab.index] for slab in chosen]), strict=True
            ):
                offset = self._take(slab, length)
                if offset is None:
                    self.release(extents)
                    drives.remove(slab)
                    break
                extents += (slab.index, offset, length)
            else:
                return tuple(extents)
        return None

    def _take(self, slab: Slab, nbytes: int) -> int | None:
        """Allocate space on a drive, which is retired if growing its file fails."""
        try:
            return slab.allocate(nbytes)
        except OSError as error:
            self.retire(slab, error)
            return None


def _divided(image: int, costs: Sequence[float]) -> list[int]:
    """Bytes of an image for each of these drives, in whole blocks: in proportion to their speed, and one block at least."""
    blocks = image // ALIGNMENT
    lengths: list[int] = []
    for at, cost in enumerate(costs):
        following = len(costs) - at - 1
        part = 1 / cost / sum(1 / other for other in costs[at:])
        length = min(max(1, round(blocks * part)), blocks - following)
        lengths.append(length * ALIGNMENT)
        blocks -= length
    return lengths
