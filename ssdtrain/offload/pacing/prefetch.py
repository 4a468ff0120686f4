"""Reads ahead of backward, along the tape."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from math import inf

import torch

from ssdtrain.config.units import MiB
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.buffers import Buffers
from ssdtrain.offload.transfer.mover import Mover
from ssdtrain.offload.transfer.state import State

# Looked up once: each saved tensor comes by here.
_STORING, _STORED, _STAGED, _LOADING = State.STORING, State.STORED, State.STAGED, State.LOADING

MATTERS = 2 * MiB
"""Bytes of a tape from which on an arena is compared with what has left memory: of less it is small, too."""

ADVANCE = 0.5
"""Share of how far it goes ahead: bytes that backward has between two looks at what is next."""

LARGE = 0.25
"""Share of the limit of what is read ahead: a tensor above it is large."""


class Prefetcher:
    """Keeps up to `limit` bytes loaded ahead of where backward is, and on a device `Departures.limit` of them in its memory.

    The tape determines what comes next: its operators in reverse. When it runs out, the tapes that follow.
    Within that distance a store that has not begun is cancelled, since its bytes are about to be needed, and one that has
    begun leaves its bytes in memory.

    Small loads are issued several at a time, when less than half of the limit is ahead: each time costs the thread that trains a
    walk down a cold tape and the waking of the I/O pool. A large one is issued as soon as it fits: where large tensors are
    needed one right after another, all that fit have to be there before the first.

    Note: [One walk]
    A region is looked at when the walk comes to it, where its read begins, and again when it is brought to the device. What lies
    between backward and the end of the walk is `_ahead`, in the order in which backward will ask; of these, `_unread` wait for
    room, or for the end of their stores. The walk begins again where the order is another one (another tape, a new pass), and
    where a region that was read ahead has been dropped.

    Args:
        mover: starts the loads.
        buffers: sized for what is ahead and what backward holds.
        options: how many bytes ahead, where the config gives it; 0: none.
    """

    def __init__(self, mover: Mover, buffers: Buffers, options: EngineOptions) -> None:
        self.limit = options.prefetch or 0
        self._largest_load = 0  # bytes of the largest region that was loaded so far
        self.backwards = 0  # that have begun
        self.closed = False
        self._mover = mover
        self._buffers = buffers
        self._options = options
        self._away: int | None = None  # bytes of the tape that had left memory when its backward began
        self._wanted = 0  # the most that a tape wanted loaded ahead so far
        self._following: Sequence[Tape] = ()
        # See Note: [One walk].
        self._walked: tuple[Tape, int, int] | None = None  # tape, its pass, and bytes evicted by then
        self._coming: Iterator[Region] = iter(())
        self._ahead: deque[Region] = deque()
        self._ahead_bytes = 0
        self._unread: list[Region] = []
        # Of the first that are ahead, which are on the device or on the way there: the bytes that each takes there.
        self._taken: deque[int] = deque()
        self._taken_bytes = 0
        # Bytes that backward had since the last look, and has before the next one, and before more is read.
        self._had = 0
        self._until = self._until_reads = 0.0
        # In a look: reads may begin; the arena has been fitted; it is full.
        self._reads = self._fitted = self._full = False

    def size(self, tape: Tape) -> None:
        """Choose how far to read ahead of the backward of `tape`, unless the config does.

        Three of the largest regions that are loaded or 24 MiB, which keep a drive busy, but no more than an eighth of what `tape`
        has in the tiers: larger buffers would take the memory that offloading it saves. Half of a pinned arena, which takes none.
        What comes to a device from pinned slots is not read: as far as it has device memory for.
        """
        if self._options.prefetch is None and self._mover.transfer.unstaged:
            self.limit = self._mover.departures.limit
        elif self._options.prefetch is None and self._options.buffer_limit is not None:
            self.limit = self._buffers.capacity // 2
        elif self._options.prefetch is None:
            free = self._buffers.capacity // 2 if self._options.buffer is not None else 1024 * MiB
            enough = max(3 * self._largest_load, 24 * MiB)
            if self._wanted < enough:
                here = State.RESIDENT, State.RELEASED
                stored = [r.nbytes for r in tape.regions if r is not None and r.transfer.state not in here]
                self._wanted = max(self._wanted, min(enough, max(sum(stored) // 8, self._largest_load)))
            self.limit = min(self._wanted, free)

    def missed(self, region: Region) -> None:
        """Backward needs `region`, which was not read ahead, and whose load is about to begin."""
        self._until = 0.0
        if not region.transfer.pinned:
            self._fit(region)

    def _fit(self, region: Region) -> None:
        """A read of `region` is about to begin: have an arena for what is ahead and what backward holds, unless the config gives
        its size. What is never loaded (the logits, last on their tape) takes no room in it."""
        self._largest_load = max(self._largest_load, region.nbytes)
        self._buffers.fit(self.limit + 2 * self._largest_load, self._away)

    def follow(self, tapes: Sequence[Tape]) -> None:
        """Note whose backward comes after the current one, in order."""
        self._following = tapes
        self._walked = None

    def begin(self, tape: Tape) -> None:
        """The backward of `tape` begins. Called with the engine's lock held, as `run`."""
        self.backwards += 1
        self._walked = None
        if not self.closed:
            self.size(tape)
        if self._buffers.optional:
            left = (region.nbytes for region in tape.regions if region is not None and region.emptied)
            self._away = sum(left) if tape.nbytes >= MATTERS else None
        self._mover.keep_tail(tape)
        self.run(tape)

    def run(self, tape: Tape, had: int = 0) -> None:
        """Issue what fits, beginning below where backward is on `tape`. Called with the engine's lock held.

        Args:
            had: bytes that backward gets now.
        """
        if self.closed or self.limit <= 0:
            return
        walk = tape, tape.pass_number, self._mover.metrics.evicted_bytes
        self._had += had
        if walk != self._walked:
            self._walked = walk
            self._restart(tape)
        elif self._had < self._until:
            return
        self._reads, self._had = self._had >= self._until_reads, 0
        self._leave_behind()
        self._until = self._read_ahead()
        if self._mover.transfer.copies:
            try:
                brought = self._bring()
            except torch.OutOfMemoryError:
                brought = False  # it is not needed yet; where backward asks for it, it is an error
            self._until = min(self._until, ADVANCE * self._mover.departures.limit) if brought else 0.0

    def _restart(self, tape: Tape) -> None:
        tapes = [tape, *(following for following in self._following if following is not tape)]
        self._coming = chain.from_iterable(each.coming() for each in tapes)
        self._ahead.clear()
        self._taken.clear()
        self._unread = []
        self._ahead_bytes = self._taken_bytes = 0
        self._until_reads = self._bytes_until_reads()

    def _leave_behind(self) -> None:
        """Take off what backward has had."""
        ahead, taken = self._ahead, self._taken
        while ahead:
            region = ahead[0]
            if region.last_pass != region.tape.pass_number and not region.tape.passed(region):
                break
            ahead.popleft()
            self._ahead_bytes -= region.nbytes
            if taken:
                self._taken_bytes -= taken.popleft()

    def _read_ahead(self) -> float:
        """Walk on, and read what there is room for. Returns how many bytes backward has until there is more to do."""
        mover, ahead = self._mover, self._ahead
        begun = mover.loads.prefetched_bytes
        self._fitted = self._full = False
        if self._unread and self._reads:
            unread, self._unread = self._unread, []
            for earlier in unread:
                if not self._reads or not (_had(earlier) or self._settle(earlier)):
                    self._unread.append(earlier)
        far = max(self.limit, mover.departures.limit) if mover.transfer.copies else self.limit
        nbytes, coming = self._ahead_bytes, self._coming
        while nbytes < far and (region := next(coming, None)) is not None:
            ahead.append(region)
            nbytes += region.nbytes
            transfer = region.transfer
            if transfer.state is _STORED and transfer.pinned:
                continue  # nothing is to be read
            if not self._settle(region):
                self._unread.append(region)
        self._ahead_bytes = nbytes
        if mover.loads.prefetched_bytes > begun:
            mover.flush()
        self._until_reads = self._bytes_until_reads()
        if self._full:
            return 0.0  # a buffer may come back at any time
        if self._unread:
            return self._until_reads
        if nbytes < far:
            return inf  # nothing comes after them
        large = ahead[-1].nbytes > LARGE * self.limit
        return self._until_reads if large else max(self._until_reads, nbytes - (1 - ADVANCE) * far)

    def _settle(self, region: Region) -> bool:
        """Begin the read of a region that is stored, or have one that is being stored stay. False: it can be read later only."""
        transfer = region.transfer
        if transfer.state is _STORING and not self._mover.stop_store(region):
            self._mover.keep_resident(region)
            return region.pointer != 0 or transfer.payload is not None
        if transfer.state is not _STORED:
            return True
        loads = self._mover.loads
        if not self._reads or (
            loads.prefetched_bytes and loads.prefetched_bytes + region.nbytes > self.limit
        ):
            self._reads = False
            return False
        if not self._fitted or region.nbytes > self._largest_load:
            self._fit(region)
            self._fitted = True
        self._reads = loads.begin(region, on_demand=False)
        self._full = not self._reads
        return self._reads

    def _bytes_until_reads(self) -> float:
        """Return how many bytes backward has until half of the limit is ahead, or a large region fits into the rest. 0: that is
        so, or backward has passed without asking some of what was read (the loss of another head), which is not ahead."""
        loads, limit = self._mover.loads, self.limit
        ahead = loads.prefetched_bytes
        if not ahead or _had(loads.nearest_prefetched()):
            return 0.0
        until = ahead - limit / 2
        following = self._unread[0].nbytes if self._unread else self._ahead[-1].nbytes if self._ahead else 0
        if following > LARGE * limit:
            until = min(until, ahead + following - limit)
        return max(until, 0.0)

    def _bring(self) -> bool:
        """Bring the next `Departures.limit` bytes to the device that backward will ask for.

        Of those that come from a drive: have the device memory, and begin the copies of those whose read has ended, in order.
        What is in a staging buffer or in pinned memory is copied from there.

        Returns:
            All of them are there, or on the way.
        """
        mover, loads = self._mover, self._mover.loads
        room = mover.departures.limit - self._taken_bytes
        # The walk ends with the first region that reaches past its distance: it may be read, and has no memory yet.
        beyond = self._ahead[-1] if self._ahead_bytes > max(self.limit, mover.departures.limit) else None
        in_order = True
        for place, region in enumerate(islice(self._ahead, len(self._taken), None), len(self._taken)):
            transfer = region.transfer
            state = transfer.state
            taken = 0 if region.pointer else region.nbytes  # it is in its tensor
            here = state is _STORING or state is _STAGED
            if here and taken and transfer.payload is None and transfer.codec is not None:
                taken += transfer.stored_bytes  # decoded as it comes: its payload is there beside it
            room -= taken
            if place and (room < 0 or region is beyond):
                break
            if not taken:
                pass
            elif transfer.pinned:
                if in_order and state is _STORED:
                    loads.begin(region, on_demand=False)
            elif here and transfer.payload is not None:
                pass  # decoded on the stream that asks for it
            elif state is _STAGED:
                mover.unstage(region)
            elif state is _STORING and transfer.loaded is None:
                mover.bring_back(region)
            elif state is _STORED or state is _LOADING:
                loads.reserve_target(region)
                operation = transfer.operation
                in_order = in_order and operation is not None and operation.done() and not operation.failed()
                if in_order:
                    loads.end(region)
            if in_order:
                self._taken.append(taken)
                self._taken_bytes += taken
        return in_order


def _had(region: Region) -> bool:
    """Return whether backward has asked for `region` in this pass, or will not ask for it."""
    return region.last_pass == region.tape.pass_number or region.tape.passed(region)
