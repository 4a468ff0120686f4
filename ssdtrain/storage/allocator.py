"""Best-fit allocator of offsets, shared by the arena, the host tier and the spill files.

Works on sizes and offsets only. Not thread-safe: the caller holds a lock.
"""

from bisect import bisect_left, insort
from collections import defaultdict


class RangeAllocator:
    """Best fit over the offsets [0, size), in multiples of `alignment`; `allocate` and `free` count them from `first`.

    Note: [Deferred coalescing]
        Every training step allocates and frees the same lengths, so a freed range is cached by length for the next
        `allocate` of that length. Cached ranges are merged with their neighbours only when no free range fits, or when
        free space is queried; once everything is freed, all space is one range again.
    """

    def __init__(self, size: int, alignment: int, first: int = 0) -> None:
        if size < 0 or size % alignment:
            raise ValueError(f"size must be a multiple of {alignment} bytes, got {size} bytes")
        self.alignment = alignment
        self.size = 0
        self.used = 0
        self._first = first
        self._by_size: list[tuple[int, int]] = []  # (length, start), sorted
        self._ends: dict[int, int] = {}  # start -> end of a free range
        self._starts: dict[int, int] = {}  # end -> start of a free range
        self._taken: dict[int, int] = {}  # start -> length
        self._ready: dict[int, list[int]] = defaultdict(list)  # length -> starts; Note: [Deferred coalescing]
        if size:
            self.extend(size)

    def rounded(self, nbytes: int) -> int:
        """`nbytes` rounded up to the alignment, at least one unit."""
        return -(-nbytes // self.alignment) * self.alignment or self.alignment

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a range of `nbytes` (rounded up), or None where no free range is that long."""
        alignment = self.alignment
        length = -(-nbytes // alignment) * alignment or alignment  # `rounded`
        start = ready.pop() if (ready := self._ready[length]) else self._best(length)
        if start is None:
            return None
        self._taken[start] = length
        self.used += length
        return start + self._first

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

    def free(self, start: int) -> int:
        """Free the range at `start`, which `allocate` returned.

        Returns:
            Its length in bytes.

        Raises:
            KeyError: nothing is allocated at `start` (a double free).
        """
        start -= self._first
        length = self._taken.pop(start)
        self.used -= length
        self._ready[length].append(start)
        return length

    def extend(self, nbytes: int) -> None:
        """Append `nbytes` of free space (a multiple of the alignment)."""
        if nbytes % self.alignment:
            raise ValueError(f"growth must be a multiple of {self.alignment} bytes, got {nbytes}")
        start = self.size
        self.size += nbytes
        self._join(start, self.size)

    @property
    def trailing(self) -> int:
        """Free bytes at the end, contiguous with what `extend` appends."""
        self._join_ready()
        return self.size - self._starts.get(self.size, self.size)

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """Every free range as (start, end), in order."""
        self._join_ready()
        return sorted(self._ends.items())

    def _join_ready(self) -> bool:
        """Merge cached ranges with their free neighbours. Returns False if there were none."""
        ready, self._ready = self._ready, defaultdict(list)
        for length, starts in ready.items():
            for start in starts:
                self._join(start, start + length)
        return any(ready.values())

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
