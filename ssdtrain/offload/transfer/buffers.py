"""The arena that restored tensors live in, sized by what forwards saved, unless the config gives its size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.storage import Arena, Lease
from ssdtrain.storage.memory import ALIGNMENT, HUGE_PAGE

logger = logging.getLogger("ssdtrain")


class Buffers:
    """One arena at a time; an outgrown one is closed when its last buffer has come back.

    Args:
        nbytes: fixed size in bytes, or None: as much as `fit` finds it to need.
        register: pins the arena's memory for a device, or None.
        meter: counts the bytes of the arena, if they belong to the memory that activations take.
        node: NUMA node of the device; None: that of the calling thread.
    """

    def __init__(
        self,
        nbytes: int | None,
        register: Callable[[int, int], Any] | None,
        meter: ActivationMeter | None,
        node: int | None = None,
    ) -> None:
        self._node = node
        self._fixed = nbytes
        self._register = register
        self._meter = meter
        self._arena: Arena | None = None
        self._outgrown: list[Arena] = []
        self._smaller: list[Arena] = []  # pinned, and in use beside a larger one
        self._cannot_grow = False
        self.optional = meter is not None and nbytes is None
        """Its size follows what forwards save, in the memory that activations take."""
        self.used = True
        """False, where it is `optional`: there is none after `close_unused`, and tensors come back into memory of their own."""
        # Of this step: an arena was smaller than what had left memory; the other way round.
        self._paid = self._unpaid = False
        if nbytes is not None:
            self._make(nbytes)

    @property
    def capacity(self) -> int:
        """Bytes of the arena, 0 before there is one."""
        return self._arena.capacity if self._arena is not None else 0

    @property
    def counted_bytes(self) -> int:
        """Bytes of all arenas, where they are of the memory that activations take; else 0."""
        return sum(arena.capacity for arena in self._arenas()) if self._meter is not None else 0

    def _arenas(self) -> list[Arena]:
        return [*self._outgrown, *self._smaller, *([self._arena] if self._arena is not None else [])]

    @property
    def allocated(self) -> int:
        """Bytes handed out and not yet returned, outgrown arenas included."""
        return sum(arena.allocated for arena in self._arenas())

    @property
    def peak(self) -> int:
        """The most bytes of the arena that were handed out at once: about what of it is in memory."""
        return self._arena.peak if self._arena is not None else 0

    def _make(self, nbytes: int) -> None:
        # A huge page is more than some small models save.
        huge = nbytes >= HUGE_PAGE or not self.optional
        self._arena = Arena(nbytes, huge_pages=huge, register=self._register, node=self._node)
        self._count(self._arena.capacity)

    def _count(self, nbytes: int) -> None:
        if self._meter is not None:
            self._meter.adjust(nbytes)

    def fit(self, wanted: int, away: int | None = None) -> None:
        """Have at least `wanted` bytes, unless the size is fixed. Grows by a quarter at least, so that it settles.

        Args:
            away: bytes that are in tiers and not in memory; None: enough. Where it is `optional`, an arena that is larger than
                that would raise the peak above that of keeping everything: there is none, and it goes when the step is over.
        """
        if self._outgrown:
            self.close_returned()
        if self.optional and away is not None and away < max(self._in_pages(wanted), self.capacity):
            self._unpaid = self.capacity > 0 and not self._paid
            return
        self._paid, self._unpaid = True, False
        if self._fixed is not None or not self.used or wanted <= self.capacity:
            return
        if self._arena is not None:
            wanted = max(wanted, self.capacity * 5 // 4)
            self._outgrown.append(self._arena)
            self.close_returned()
        self._make(self._in_pages(wanted))

    def _in_pages(self, nbytes: int) -> int:
        """Return `nbytes` in whole huge pages; in small ones where fewer bytes are optional."""
        page = ALIGNMENT if self.optional and nbytes < HUGE_PAGE else HUGE_PAGE
        return -(-nbytes // page) * page

    def close_unused(self) -> None:
        """Between steps: have no arena where it is not `used`, or was larger than what it gave room in the step."""
        unpaid, self._paid, self._unpaid = self._unpaid, False, False
        if (unpaid or not self.used) and self._arena is not None:
            self._outgrown.append(self._arena)
            self._arena = None
        if self._outgrown:
            self.close_returned()

    def missing(self, wanted: int, limit: int) -> int:
        """Bytes of the arena to `pin`, so that there is one of `wanted` bytes, but no more than `limit` bytes in all. 0: none.
        Doubles at least, so that it settles."""
        wanted = min(max(wanted, 2 * self.capacity), limit - sum(arena.capacity for arena in self._arenas()))
        return 0 if wanted <= self.capacity or self._cannot_grow else wanted

    def pin(self, nbytes: int, room: Callable[[], int] | None = None) -> Arena | None:
        """A pinned arena of `nbytes` for `adopt`. Called without the engine's lock: to pin memory takes seconds, and may wait for
        the device. Where the host has no memory to pin, there is none, with a warning.

        Args:
            room: returns how many bytes more may be pinned now; None: `nbytes`. The kernel ends a process that pins more than
                its cgroup may have, without an error.
        """
        try:
            free = nbytes if room is None else room()
            if free <= self.capacity:
                raise MemoryError(f"{free} bytes more are this rank's share of the node's free memory")
            return Arena(self._in_pages(min(nbytes, free)), register=self._register, node=self._node)
        except (OSError, MemoryError, torch.cuda.CudaError) as error:
            self._cannot_grow = True
            logger.warning(
                "the arena stays at %d bytes: %d could not be pinned (%s); fewer ranks on this node, or offload.buffer, help",
                self.capacity, nbytes, str(error),
            )  # fmt: skip
            return None

    def adopt(self, arena: Arena) -> bool:
        """Use `arena` from now on. False: these buffers were closed meanwhile, and the caller closes it. The one before stays in
        use: to unpin memory waits for the device, where a collective may wait for another rank."""
        if self._cannot_grow:
            return False
        if self._arena is not None:
            self._smaller.append(self._arena)
        self._arena = arena
        self._count(arena.capacity)
        return True

    def acquire(self, nbytes: int, lead: int = 0) -> Lease | None:
        """Return a buffer of `nbytes` whose address is `lead` modulo the I/O alignment, or None: full, or none made yet."""
        if self._arena is None:
            return None
        lease = self._arena.acquire(nbytes, page_offset=lead)
        if lease is None:
            smaller = (arena.acquire(nbytes, page_offset=lead) for arena in self._smaller)
            lease = next((found for found in smaller if found is not None), None)
        return lease

    def close_returned(self) -> None:
        """Close outgrown arenas of which no buffer is in use, and count them no more."""
        still = []
        for arena in self._outgrown:
            if arena.allocated:
                still.append(arena)
            else:
                self._count(-arena.capacity)
                arena.close()
        self._outgrown = still

    def close(self) -> list[Arena]:
        """Hand out nothing any more. Returns pinned arenas, which the caller closes without the engine's lock: to unpin memory
        waits for the device. One of which a buffer is still in use is unmapped when that comes back."""
        self._cannot_grow = True
        arenas, self._outgrown, self._smaller, self._arena = self._arenas(), [], [], None
        if self._meter is None:
            return arenas
        self._outgrown = arenas
        for arena in arenas:
            arena.close()
        self.close_returned()
        return []
