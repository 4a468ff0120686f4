"""Reads ahead of backward, along the tape."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ssdtrain.config.units import MiB
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.buffers import Buffers
from ssdtrain.offload.transfer.mover import Mover
from ssdtrain.offload.transfer.state import State

__all__ = ["Prefetcher"]

MATTERS = 2 * MiB
"""Bytes of a tape from which on an arena is compared with what has left memory: of less it is small, too."""

ADVANCE = 0.25
"""Share of `Departures.limit`: bytes that backward has between two looks at what is next on the way to the device."""

LARGE = 0.25
"""Share of the limit of what is read ahead: a tensor above it is large."""


class Prefetcher:
    """Keeps up to `limit` bytes loaded ahead of where backward is.

    The tape determines what comes next: its operators in reverse. When it runs out, `next_tapes` are those that follow.
    Within that distance a store that has not begun is cancelled, since its bytes are about to be needed, and one that has
    begun leaves its bytes in memory.

    Small loads are issued several at a time, when less than half of the limit is ahead: each time costs the thread that trains a
    walk down a cold tape and the waking of the I/O pool. A large one is issued as soon as it fits: where large tensors are
    needed one right after another, all that fit have to be there before the first.

    Args:
        mover: starts the loads.
        buffers: sized for what is ahead and what backward holds.
        options: how many bytes ahead, where the config gives it; 0: none.
    """

    def __init__(self, mover: Mover, buffers: Buffers, options: EngineOptions) -> None:
        self.limit = options.prefetch or 0
        self.largest = 0  # bytes of the largest region so far
        self._largest_load = 0  # bytes of the largest region that was loaded so far
        self.backwards = 0  # that have begun
        self.closed = False
        self.next_tapes: list[Tape] = []
        self._mover = mover
        self._buffers = buffers
        self._options = options
        self._away: int | None = None  # bytes of the tape that had left memory when its backward began
        self._wanted = 0  # the most that a tape wanted loaded ahead so far
        self._next_bytes = 0  # of the region at which the last walk ended
        # Tape and pass in which all that is near was on its way to the device, and bytes that backward had since.
        self._advanced: tuple[Tape, int] | None = None
        self._had = 0
        self._exhausted: tuple[object, ...] | None = None  # when nothing was left to read ahead: see `_now`

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

    def fit(self, region: Region) -> None:
        """A load of `region` is about to begin: have an arena for what is ahead and what backward holds, unless the config gives
        its size. What is never loaded (the logits, last on their tape) takes no room in it."""
        self._largest_load = max(self._largest_load, region.nbytes)
        self._buffers.fit(self.limit + 2 * self._largest_load, self._away)

    def begin(self, tape: Tape) -> None:
        """The backward of `tape` begins. Called with the engine's lock held, as `run`."""
        self.backwards += 1
        self._advanced = self._exhausted = None
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
        if self._mover.transfer.copies:
            self._had += had
            far = self._had > ADVANCE * self._mover.departures.limit
            if far or self._advanced is None or self._advanced != (tape, tape.pass_number):
                try:
                    self._advanced = (tape, tape.pass_number) if self._advance(tape) else None
                    self._had = 0
                except torch.OutOfMemoryError:
                    self._advanced = None  # it is not needed yet; where backward asks for it, it is an error
        if self._enough(tape) or (self._exhausted is not None and self._exhausted == self._now(tape)):
            return
        begun = self._mover.loads.prefetched_bytes
        near = self._along(tape, self.limit)
        for following in self.next_tapes:
            if near <= 0:
                break
            if following is not tape:
                near = self._along(following, near)
        if self._mover.loads.prefetched_bytes > begun:
            self._mover.flush()
        if near > 0:
            self._exhausted = self._now(tape)

    def _now(self, tape: Tape) -> tuple[object, ...]:
        """While it is the same there is nothing more to read ahead, if there was nothing before."""
        return tape, tape.pass_number, self._mover.metrics.evicted_bytes, [*self.next_tapes]

    def _advance(self, tape: Tape) -> bool:
        """Bring the next `Departures.limit` bytes to the device that backward will ask for.

        Of those that come from a tier: have the device memory, and begin the copies of those whose read has ended, in order.
        What is in a staging buffer is copied from there.

        Returns:
            All of them are there, or on the way.
        """
        mover = self._mover
        room = mover.departures.limit
        near = max(self.limit, room)
        in_order = True
        for place, region in enumerate(self._coming(tape)):
            near -= region.nbytes
            if near < 0 and place:
                return in_order
            if region.pointer:
                continue  # in its tensor
            room -= region.nbytes
            if room < 0 and place:
                return in_order
            if region.transfer.payload is not None and region.transfer.state in (State.STAGED, State.STORING):
                continue  # decoded on the stream that asks for it
            if region.transfer.state is State.STAGED:
                mover.unstage(region)
            elif region.transfer.state is State.STORING and region.transfer.loaded is None:
                mover.bring_back(region)
            elif region.transfer.state in (State.STORED, State.LOADING):
                mover.loads.reserve_target(region)
                operation = region.transfer.operation
                in_order = in_order and operation is not None and operation.done() and not operation.failed()
                if in_order:
                    mover.loads.end(region)
        return in_order

    def _coming(self, tape: Tape) -> Iterator[Region]:
        """Regions that backward has not had, in the order in which it will ask."""
        for following in (tape, *(other for other in self.next_tapes if other is not tape)):
            yield from following.coming()

    def _enough(self, tape: Tape) -> bool:
        """Whether half of the limit is ahead of backward, and a large region does not fit into the rest. What backward has passed
        without asking (the loss of another head) is not ahead."""
        loads = self._mover.loads
        ahead, following, limit = loads.prefetched_bytes, self._next_bytes, self.limit
        if 2 * ahead <= limit or (following > LARGE * limit and ahead + following <= limit):
            return False
        furthest = loads.furthest_prefetched()
        if furthest.tape is tape:
            return not tape.passed(furthest.index)
        return any(following is furthest.tape for following in self.next_tapes)

    def _along(self, tape: Tape, near: int) -> int:
        """Go down `tape` for `near` bytes; returns the bytes of that distance that are left."""
        mover, loads = self._mover, self._mover.loads
        fitted = False
        for region in tape.coming():
            state = region.transfer.state
            self._next_bytes = region.nbytes
            if state is State.STORED:
                if loads.prefetched_bytes and loads.prefetched_bytes + region.nbytes > self.limit:
                    return 0
                if not fitted or region.nbytes > self._largest_load:
                    self.fit(region)
                    fitted = True
                if not loads.begin(region, on_demand=False):
                    return 0
            elif state is State.STORING and not mover.stop_store(region):
                mover.keep_resident(region)
            near -= region.nbytes
            if near <= 0:
                return 0
        return near
