"""What transfers queue for in the cost model (tiers, bytes of limited buffers), and the bytes on the device over its time."""

from __future__ import annotations

from collections import deque

from ssdtrain.planner.model.types import BlockTimes, Tier

__all__ = ["Bounded", "Job", "Occupancy", "PartialReleaseQueue", "Saved", "Server"]


class Job:
    """One store: its copy off the device and its write. Times are known once it has been served."""

    __slots__ = ("begin", "cancelled", "end", "left", "nbytes", "over", "ready", "served")

    def __init__(self, nbytes: int, ready: float) -> None:
        self.nbytes = nbytes
        self.ready = ready  # for the tier
        self.left = ready  # when the tensor's bytes are off the device (its copy has ended, or without a link its write)
        self.begin = self.end = 0.0  # of the write
        self.served = self.cancelled = False
        self.over = False  # the thread that trains has noticed its end


class Server:
    """A tier: writes wait in line until time has come to them, so that one may still be cancelled; reads go
    before them."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.write_free = self.read_free = 0.0
        self.used = self.peak = self.written = self.read = 0
        self._line: deque[Job] = deque()

    def enqueue(self, job: Job) -> None:
        self._line.append(job)

    def serve(self, until: float) -> None:
        """Begin the writes that can begin by `until`."""
        line = self._line
        while line:
            job = line[0]
            if not job.cancelled:
                begin = job.ready if job.ready > self.write_free else self.write_free
                if begin > until:
                    return
                self._begin(job, begin)
            line.popleft()

    def begun(self, job: Job, when: float) -> bool:
        """Its write is under way at `when`, and cannot be cancelled."""
        if job.ready > when:
            return False
        if job.served:
            return True
        if self.tier.depth == 1:
            return False
        ahead = 1  # one that is being served
        for other in self._line:
            if other is job or ahead >= self.tier.depth:
                break
            ahead += not other.cancelled
        return ahead < self.tier.depth

    def finish(self, job: Job) -> float:
        """The end of `job`, which nothing will cancel any more."""
        while not job.served:
            ahead = self._line.popleft()
            if not ahead.cancelled:
                self._begin(ahead, max(ahead.ready, self.write_free))
        return job.end

    def _begin(self, job: Job, begin: float) -> None:
        job.begin, self.write_free = begin, begin + job.nbytes / self.tier.write
        if self.tier.shared:
            self.read_free = self.write_free
        job.end = self.write_free + self.tier.latency
        job.served = True

    def begin_read(self, nbytes: int, ready: float) -> float:
        """Read from `ready` on; returns the end."""
        self.serve(ready)
        self.read_free = max(ready, self.read_free) + nbytes / self.tier.read
        if self.tier.shared:
            self.write_free = self.read_free
        self.read += nbytes
        return self.read_free + self.tier.latency


class Saved:
    """What one block of one tape left for backward."""

    rest = 0  # bytes of it that are copied out when the store begins, and on the device until backward has had it
    job: Job | None = None
    server: Server | None = None
    departed = False
    pooled = False  # it came back into the arena
    read: float | None = None  # when the read from the tier ends; None: there is none

    def __init__(self, nbytes: int, storing: float, held: int, held_to: int) -> None:
        self.nbytes = self.moved = (
            nbytes  # on the device before its store and after its load; of these in the tier
        )
        self.storing = storing  # seconds of computation that beginning its store takes
        self.held = held  # bytes that the program has too
        self.held_to = held_to  # until its forward is past the block of this number


class PartialReleaseQueue:
    """Stores of blocks that leave a device in part, until more bytes than `limit` were saved since, their own included."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[tuple[Saved, BlockTimes, int]] = []
        self._passed = 0

    def add(self, saved: Saved, times: BlockTimes) -> None:
        self._waiting.append((saved, times, self._passed - saved.nbytes))

    def passed(self, nbytes: int) -> list[tuple[Saved, Job, BlockTimes]]:
        """`nbytes` more are saved: what leaves now."""
        self._passed += nbytes
        if not self._waiting:
            return []
        going = [
            (saved, saved.job, times)
            for saved, times, before in self._waiting
            if self._passed - before > self._limit and saved.job is not None and not saved.job.cancelled
        ]
        self._waiting = [one for one in self._waiting if self._passed - one[2] <= self._limit]
        return going


class Bounded:
    """Bytes that are in use until known times, first come first served."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._admitted = 0.0
        self._until: deque[tuple[float, int]] = deque()

    def admit(self, nbytes: int, now: float) -> float:
        """When there is room for `nbytes`, not before `now`. One alone always has room."""
        until = self._until
        if now < self._admitted:  # in order: not before an earlier one
            now = self._admitted
        while until and (until[0][0] <= now or self.used + nbytes > self.limit):
            when, size = until.popleft()
            self.used -= size
            if now < when:
                now = when
        self._admitted = now
        return now

    def hold(self, nbytes: int, until: float) -> None:
        self.used += nbytes
        self._until.append((until, nbytes))


class Occupancy:
    """What comes and goes, in any order of time.

    Note: [What the program has too]
    The engine lets go of a tensor when it has left. Its memory is free then only if nobody else has the tensor: whoever called a
    block has what the block was called with, and the output of an encoder is there for all of a decoder. So what a step that was
    profiled found to be there all the same (`Block.held`) is counted until forward is past that block.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[float, bool, int]] = []  # when, after all others of that time, bytes
        self._place = 0.0  # the block in which forward is
        self._held: list[
            tuple[int, int]
        ] = []  # past which block the program lets go of how many bytes that have left

    def hold(self, when: float, nbytes: int, *, late: bool = False) -> None:
        """`nbytes` more (negative: fewer) from `when` on. `late`: after all others of that time."""
        if nbytes:
            self._changes.append((when, late, nbytes))

    def leave(self, saved: Saved, when: float, *, late: bool = False) -> None:
        """The engine lets go of a tensor. See Note: [What the program has too]."""
        saved.departed = True
        held = saved.held if saved.held_to >= self._place else 0
        if held:
            self._held.append((saved.held_to, held))
        self.hold(when, held - saved.nbytes, late=late)

    def past(self, place: float, now: float) -> None:
        """Forward has come to the block `place`."""
        self._place = place
        if not self._held:
            return
        free = sum(nbytes for until, nbytes in self._held if until < place)
        if free:
            self._held = [one for one in self._held if one[0] >= place]
            self.hold(now, -free)

    def peak(self) -> tuple[int, float]:
        """The most bytes, and since when."""
        live = peak = 0
        when = 0.0
        for time, _, change in sorted(self._changes):
            live += change
            if live > peak:
                peak, when = live, time
        return peak, when

    def line(self, began: float) -> list[tuple[float, int]]:
        """(seconds since `began`, bytes from then on), and the bytes at the beginning of all, at 0.0."""
        found, live = [(0.0, 0)], 0
        for time, _, change in sorted(self._changes):
            live += change
            if time >= began:
                found.append((time - began, live))
        return found
