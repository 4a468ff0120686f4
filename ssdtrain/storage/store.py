"""Where bytes go: host memory first, then the drives. Reservations, transfers, cancellation, release, figures.

Note: [Free never blocks] `SpillStore.free` runs in finalizers, perhaps on a thread that holds the store's
lock. It cancels (without a lock) and appends the slot to a deque. Whoever reserves next, or asks for figures, drains it;
`free` itself does so when many have come together, and only if the lock is free at that moment. A slot whose transfers
are still running waits in `_ending`: its space is not handed out before they ended.
"""

import logging
import os
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ssdtrain.storage import forks, memory
from ssdtrain.storage.arena import Arena
from ssdtrain.storage.errors import StoreClosed, StoreFull
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.memory import ALIGNMENT
from ssdtrain.storage.metrics import StoreMetrics
from ssdtrain.storage.pieces import COPY_IN, COPY_OUT, READ, WRITE, image_bytes
from ssdtrain.storage.pool import PIECE, Operation, Pool, make_pool
from ssdtrain.storage.section import make_section
from ssdtrain.storage.slab import Slab
from ssdtrain.storage.slot import Slot

logger = logging.getLogger(__name__)

FREED_TOGETHER = 32
"""Slots that wait at most for the next reservation before `free` looks through them: one by one they cost backward more."""

SHARE_OF_FREE_SPACE = 0.9
"""How much of a drive's free space the ranks of a node may take when no capacity is given."""


class SpillStore:
    """Slots in host memory and on drives, and transfers to and from them. Thread-safe.

    Args:
        directories: one per drive; several share the load, and slots larger than `stripe` are spread over
            them. capacity: bytes per directory for this rank; None is 90% of the free space, divided by
            `local_world_size`. host_bytes: size of the host tier in front of the drives, bytes; 0 for none.
            threads: see `make_pool`. engine: "auto", "c" or "python". direct: "auto", "on" or "off":
            O_DIRECT. faults: injected faults (tests). stripe: bytes above which a slot is spread over several
            drives. event_query, set_device, exchange_capture_mode, device, huge_pages: see `make_pool`.

    Raises:
        OSError: a directory is missing, read-only or no directory, or refuses O_DIRECT under direct="on";
        names the path. ValueError: no tier at all, or figures that make no sense.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        *,
        capacity: int | None = None,
        host_bytes: int = 0,
        threads: int = 4,
        engine: str = "auto",
        direct: str = "auto",
        local_world_size: int = 1,
        faults: Faults | None = None,
        stripe: int = PIECE,
        event_query: int = 0,
        set_device: int = 0,
        exchange_capture_mode: int = 0,
        device: int = -1,
        huge_pages: bool = False,
    ) -> None:
        if not directories and not host_bytes:
            raise ValueError("a spill store needs a directory or a host tier (host_bytes)")
        if direct not in ("auto", "on", "off"):
            raise ValueError(f"direct is 'auto', 'on' or 'off', got {direct!r}")
        if (
            local_world_size < 1
            or host_bytes < 0
            or stripe < ALIGNMENT
            or (capacity is not None and capacity < ALIGNMENT)
        ):
            raise ValueError(
                f"local_world_size={local_world_size}, host_bytes={host_bytes}, stripe={stripe}, capacity={capacity}:"
                f" at least 1 rank, 0, {ALIGNMENT} and {ALIGNMENT} bytes"
            )
        self._lock = make_section()
        self._freed: deque[Slot] = deque()
        self._ending: list[Slot] = []
        self._live_slots = self._live_bytes = 0
        self._stripe = stripe
        self._closed = False
        self._generation = forks.generation()
        self._slabs: list[Slab] = []
        self._host: Arena | None = None
        self._pattern: memory.Map | None = None
        try:
            for index, directory in enumerate(Path(d) for d in directories):
                room = capacity if capacity is not None else _default_capacity(directory, local_world_size)
                self._slabs.append(Slab(directory, index, room, direct=direct, faults=faults))
            if host_bytes:
                self._host = Arena(host_bytes)
            self.pool: Pool = make_pool(
                [(slab.fd, slab.direct) for slab in self._slabs],
                [str(slab.directory) for slab in self._slabs],
                engine=engine,
                threads=threads,
                host_threads=threads if host_bytes else 0,
                faults=faults,
                event_query=event_query,
                set_device=set_device,
                exchange_capture_mode=exchange_capture_mode,
                device=device,
                huge_pages=huge_pages and memory.huge_pages_wanted(),
            )
        except BaseException:
            for slab in self._slabs:
                slab.close()
            if self._host is not None:
                self._host.close()
            raise
        self._transfers = self.pool.counters()
        if memory.poisoned():
            self._pattern = memory.Map(1 << 20, huge_pages=False)
            memory.fill(self._pattern.address, 0xFF, self._pattern.nbytes)
        forks.track(self)
        self._shutdown = weakref.finalize(
            self, _close_parts, self.pool, self._slabs, self._host, self._pattern
        )

    def reserve(self, nbytes: int, tier: str | None = None) -> Slot:
        """A slot for `nbytes` bytes: in the host tier while it has room, then on the drive that holds least.

        Args:
            tier: "ssd": on a drive, and in the host tier where no drive has room.

        Raises:
            StoreFull: no tier has room.
            StoreClosed: after close, or in a forked child.
        """
        if nbytes < 0:
            raise ValueError(f"a slot cannot have {nbytes} bytes")
        forks.check(self._generation, "this store")
        with self._lock:
            self._check_open()
            if self._freed or self._ending:
                self._drain()
            tiers = (self._reserve_host, self._reserve_drives)
            found = (reserve(nbytes) for reserve in (reversed(tiers) if tier == "ssd" else tiers))
            slot = next((slot for slot in found if slot is not None), None)
            if slot is None:
                raise self._full(nbytes)
            self._live_slots += 1
            self._live_bytes += nbytes
            return slot

    def write(
        self, slot: Slot, address: int, *, after_event: int = 0, later: bool = False, check: int = 0
    ) -> Operation:
        """Queue the store of `slot.nbytes` bytes at `address` (any alignment), which stay alive and unchanged until done.

        Where they do not, that is an error and no crash: memory that is not mapped fails the write (EFAULT), and a sample of
        the bytes is taken now, by which the read knows others (`SourceChanged`).

        Args:
            after_event: handle of a CUDA event that has to pass before the first byte is read; 0: none. It must live
                until the operation is done. No sample is taken: the bytes are not there yet.
            later: wake no worker for it; it begins with the next operation that wakes one, when somebody waits for it, or
                at `kick`. Waking a worker takes a core from whoever computes, so several small ones wake one together.
            check: `Operation.check` of an earlier write of the same bytes, which failed; 0: take a sample.
        """
        return self._submit(slot, WRITE, address, after_event, later, check)

    def read(self, slot: Slot, address: int, *, later: bool = False) -> Operation:
        """Queue the load of a slot into `address`, after its write has succeeded.

        Any alignment; without a copy where `address % 4096` is that of the write (`Arena.acquire(lead=...)`).

        Raises:
            ValueError: the slot holds nothing that may be read, because its write has not ended, has failed or was cancelled,
                there was none, or it was freed.
        """
        return self._submit(slot, READ, address, 0, later, 0)

    def kick(self) -> None:
        """Begin what was queued for later. Does nothing after close, or in a forked child."""
        if not self._closed and self._generation == forks.generation():
            self.pool.kick()

    def free(self, slot: Slot) -> None:
        """Cancel what has not begun, and reuse the space once what has begun is over. Idempotent, never
        blocks.
        """
        try:
            slot._held.pop()
        except IndexError:
            return
        if self._generation != forks.generation():
            return
        for operation in slot._operations:
            operation.cancel()
        self._freed.append(slot)
        # Note: [Free never blocks]
        if len(self._freed) >= FREED_TOGETHER and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def retire(self, slot: Slot, error: BaseException) -> None:
        """Reserve nothing more on the drive that `error` is about (else: on the slot's drives), with one warning.

        What is stored there stays readable. A failed CUDA event and the host tier retire nothing.
        """
        blameless = slot.tier == "host" or getattr(error, "event_code", 0) != 0
        if blameless or self._generation != forks.generation():
            return
        with self._lock:
            drives = [self._slabs[queue] for queue in slot._extents[::3]]
            named = [slab for slab in drives if str(slab.directory) == getattr(error, "filename", None)]
            for slab in named or drives:
                self._retire(slab, error)

    @property
    def stats(self) -> StoreMetrics:
        """The figures now. In a forked child those at the fork, what was transferred as it was last asked for before that."""
        if self._generation != forks.generation():
            return self._figures()  # no thread changes them, and one of the parent's may have held the lock
        with self._lock:
            if not self._closed:
                self._drain()
            self._transfers = self.pool.counters()
            return self._figures()

    def _figures(self) -> StoreMetrics:
        return StoreMetrics.of(
            self.pool.engine, self._slabs, self._host, self._transfers, self._live_slots, self._live_bytes
        )

    def close(self) -> None:
        """Wait for what is in flight, cancel the rest, close the files: their space is free again. Idempotent."""
        if self._generation != forks.generation():
            return
        with self._lock:
            self._drain()
            self._closed = True
            self._live_slots = self._live_bytes = 0  # there are no files that they could be in
        self._shutdown()

    def __enter__(self) -> "SpillStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def after_fork(self) -> None:
        """In a forked child: give up the files, so that the child does not hold their space."""
        for slab in self._slabs:
            slab.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this spill store is closed")

    def _submit(self, slot: Slot, kind: int, address: int, event: int, later: bool, check: int) -> Operation:
        forks.check(self._generation, "this store")
        if self._closed:
            self._check_open()
        if not slot._held:
            raise ValueError(f"{slot} was freed")
        if kind == READ:
            lead, check = slot.written()
        else:
            lead = address % ALIGNMENT if slot._lease is None else 0
        if slot._lease is not None:
            kind = COPY_OUT if kind == READ else COPY_IN
        operation = self.pool.submit(kind, address, slot.nbytes, lead, slot._extents, event, later, check)
        if not kind & 1:
            slot.note_write(operation, lead)
        earlier = slot._operations
        if len(earlier) > 1:  # a slot is written once and read once, as a rule
            earlier = tuple([old for old in earlier if not old.done()])
        slot._operations = (*earlier, operation)
        return operation

    def _retire(self, slab: Slab, error: BaseException) -> None:
        if slab.retired:
            return
        slab.retired = True
        left = sum(not other.retired for other in self._slabs)
        text = "the drive behind %s takes no more data after an error: %s; %d of %d drives are left"
        logger.warning(text, slab.directory, error, left, len(self._slabs))

    def _take(self, slab: Slab, nbytes: int) -> int | None:
        """Space on a drive; one that fails while its file grows is passed over from then on."""
        try:
            return slab.take(nbytes)
        except OSError as error:
            self._retire(slab, error)
            return None

    def _reserve_host(self, nbytes: int) -> Slot | None:
        lease = self._host.acquire(nbytes) if self._host is not None else None
        return None if lease is None else Slot(nbytes, (len(self._slabs), lease.address, nbytes), lease)

    def _reserve_drives(self, nbytes: int) -> Slot | None:
        """On as many drives as the slot has stripes, the emptiest first; on fewer where some are full."""
        image = image_bytes(nbytes)
        if len(self._slabs) == 1:
            offset = self._take(self._slabs[0], image)
            return None if offset is None else Slot(nbytes, (0, offset, image), None)
        drives = [slab for slab in self._slabs if not slab.retired]
        drives.sort(key=lambda slab: slab.used)
        for parts in range(min(len(drives), max(1, -(-nbytes // self._stripe))), 0, -1):
            share = -(-image // parts // ALIGNMENT) * ALIGNMENT
            extents: list[int] = []
            for slab in drives:
                length = min(share, image - share * (len(extents) // 3))
                offset = self._take(slab, length)
                if offset is not None:
                    extents += (slab.index, offset, length)
                    if len(extents) == 3 * parts:
                        return Slot(nbytes, tuple(extents), None)
            self._give(extents)
        return None

    def _give(self, extents: Sequence[int]) -> None:
        for at in range(0, len(extents), 3):
            slab = self._slabs[extents[at]]
            length = slab.give(extents[at + 1])
            if self._pattern is not None:
                slab.poison(extents[at + 1], length, memory.view(self._pattern.address, self._pattern.nbytes))

    def _drain(self) -> None:
        while self._freed:
            self._ending.append(self._freed.popleft())
        if not self._ending or self._closed:
            return
        for slot in tuple(self._ending):
            if not all(operation.done() for operation in slot._operations):
                continue
            # Before its space is free: a signal's exception (Ctrl-C) may end this anywhere, and nothing may be given twice.
            self._ending.remove(slot)
            if slot._lease is not None:
                slot._lease.release()
            else:
                self._give(slot._extents)
            self._live_slots -= 1
            self._live_bytes -= slot.nbytes

    def _full(self, nbytes: int) -> StoreFull:
        parts = [
            f"{slab.directory}: {slab.free} free{', retired' if slab.retired else ''}" for slab in self._slabs
        ]
        if self._host is not None:
            parts.append(f"host tier: {self._host.capacity - self._host.allocated} free")
        usable = [slab for slab in self._slabs if not slab.retired]
        return StoreFull(
            os.pathsep.join(str(slab.directory) for slab in self._slabs),
            nbytes,
            sum(slab.free for slab in usable),
            sum(slab.capacity for slab in self._slabs),
            "; ".join(parts),
        )


def _default_capacity(directory: Path, local_world_size: int) -> int:
    try:
        figures = os.statvfs(directory)
    except OSError:
        return ALIGNMENT  # the slab's own check names what is wrong with the directory
    free = figures.f_bavail * figures.f_frsize
    return max(ALIGNMENT, int(free * SHARE_OF_FREE_SPACE / local_world_size))


def _close_parts(pool: Pool, slabs: list[Slab], host: Arena | None, pattern: memory.Map | None) -> None:
    """What close, the garbage collector and the interpreter's exit do, whichever comes first."""
    pool.close()
    for slab in slabs:
        slab.close()
    if host is not None:
        host.close(force=True)
    if pattern is not None:
        pattern.close()
