"""The one allocator of offsets: it serves the arena, the host tier and the spill files.

It knows sizes and offsets, nothing of memory or files. Not thread-safe: its owner holds a lock.
"""

from bisect import bisect_left, insort


class RangeAllocator:
    """Best fit over the offsets [0, size), in multiples of `alignment`.

    Note: [Given back as it was] Every step of a training takes and gives the same lengths, so a range that is given back
    waits as it is for the next `take` of its length. Only when nothing else fits, or somebody looks, do such ranges join
    their neighbours: free space of any shape still becomes one range again when all is given back.
    """

    def __init__(self, size: int, alignment: int) -> None:
        if size < 0 or size % alignment:
            raise ValueError(f"a size of {size} bytes is no multiple of the alignment, {alignment} bytes")
        self.alignment = alignment
        self.size = 0
        self.used = 0
        self._by_size: list[tuple[int, int]] = []  # (length, start), sorted
        self._ends: dict[int, int] = {}  # start -> end of a free range
        self._starts: dict[int, int] = {}  # end -> start of a free range
        self._taken: dict[int, int] = {}  # start -> length
        self._ready: dict[int, list[int]] = {}  # length -> starts. See Note: [Given back as it was]
        if size:
            self.extend(size)

    def rounded(self, nbytes: int) -> int:
        """`nbytes` as the allocator counts it: at least one unit."""
        return -(-nbytes // self.alignment) * self.alignment or self.alignment

    def take(self, nbytes: int) -> int | None:
        """The offset of a range of `nbytes` (rounded up), or None where no free range is that long."""
        length = self.rounded(nbytes)
        ready = self._ready.get(length)
        if ready is not None:
            start = ready.pop()
            if not ready:
                del self._ready[length]
        else:
            best = self._best(length)
            if best is None:
                return None
            start = best
        self._taken[start] = length
        self.used += length
        return start

    def _best(self, length: int) -> int | None:
        at = bisect_left(self._by_size, (length, -1))
        if at == len(self._by_size):
            if not self._join_ready():
                return None
            at = bisect_left(self._by_size, (length, -1))
            if at == len(self._by_size):
                return None
        found, start = self._by_size[at]
        self._remove(start, start + found)
        if found > length:
            self._insert(start + length, start + found)
        return start

    def give(self, start: int) -> int:
        """Give back the range that `take` returned; its length in bytes.

        Raises KeyError for an offset that is not taken: a range given back twice would be handed to two
        owners.
        """
        length = self._taken.pop(start)
        self.used -= length
        ready = self._ready.get(length)
        if ready is None:
            ready = self._ready[length] = []
        ready.append(start)
        return length

    def extend(self, nbytes: int) -> None:
        """Add `nbytes` (a multiple of the alignment) at the end."""
        if nbytes % self.alignment:
            raise ValueError(f"cannot grow by {nbytes} bytes, no multiple of {self.alignment}")
        start = self.size
        self.size += nbytes
        self._join(start, self.size)

    @property
    def trailing(self) -> int:
        """Free bytes at the very end: what growing adds to."""
        self._join_ready()
        return self.size - self._starts.get(self.size, self.size)

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """Every free range as (start, end), in order."""
        self._join_ready()
        return sorted(self._ends.items())

    def _join_ready(self) -> bool:
        """Join what was given back with its neighbours. False: there was nothing."""
        ready, self._ready = self._ready, {}
        for length, starts in ready.items():
            for start in starts:
                self._join(start, start + length)
        return bool(ready)

    def _join(self, start: int, end: int) -> None:
        before = self._starts.get(start)
        if before is not None:
            self._remove(before, start)
            start = before
        after = self._ends.get(end)
        if after is not None:
            self._remove(end, after)
            end = after
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        insort(self._by_size, (end - start, start))
        self._ends[start] = end
        self._starts[end] = start

    def _remove(self, start: int, end: int) -> None:
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        del self._ends[start]
        del self._starts[end]
