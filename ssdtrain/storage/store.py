"""The spill store: reserves slots in host memory and on drives, and transfers to and from them.

Note: [Free never blocks]
    `SpillStore.free` runs in finalizers, possibly on a thread that holds the store's lock. It cancels without a lock and
    appends the slot to a deque, which the next `reserve` or query drains; `free` itself drains it when many slots have
    accumulated and the lock is available. A slot with transfers in flight is kept in `_ending`, and its space is reused only
    after they have ended.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ssdtrain.storage import forks, memory
from ssdtrain.storage.arena import Arena, Register
from ssdtrain.storage.errors import StoreClosed
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.memory import ALIGNMENT
from ssdtrain.storage.metrics import StoreMetrics, transfers_since
from ssdtrain.storage.pieces import COPY_IN, COPY_OUT, DEVICE_READ, DEVICE_WRITE, READ, WRITE
from ssdtrain.storage.pool import PIECE, Operation, Pool, make_pool
from ssdtrain.storage.signal_safe_lock import holds_signal_safe_lock, make_signal_safe_lock, signals_deferred
from ssdtrain.storage.slab import Slab, default_capacity, no_room
from ssdtrain.storage.slot import Slot
from ssdtrain.storage.striping import StripedDrives

if TYPE_CHECKING:
    from ssdtrain.device import Event

FREE_BATCH = 32
"""Freed slots that `free` collects before it drains them: one by one they cost backward more."""


class SpillStore:
    """Slots in host memory and on drives, and transfers to and from them. Thread-safe.

    Args:
        directories: one per drive. With several, slots are divided among them by measured speed, and those larger than
            `stripe` are spread over all of them; see `ssdtrain.storage.striping`.
        capacity: bytes per directory for this rank. None: 90% of the free space, divided by `local_world_size`.
        host_bytes: size of the host tier in front of the drives, bytes. 0: no host tier.
        threads: concurrent writes per drive, see `make_pool`.
        engine: "auto", "c" or "python", see `make_pool`.
        direct: use of O_DIRECT: "auto" (where the file system supports it), "on" (else an error) or "off".
        local_world_size: ranks that share the drives of this node.
        faults: injected faults (tests).
        stripe: bytes above which a slot is spread over several drives.
        register, node: of the host tier's memory, see `Arena`.
        event_query, set_device, exchange_capture_mode, device, huge_pages: see `make_pool`.

    Raises:
        OSError: a directory is missing, not a directory or not writable; or O_DIRECT is unsupported and direct="on". Names
            the path. PermissionError: the system denies the calls that read memory safely.
        ValueError: no tier, or an invalid size.
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
        register: Register | None = None,
        node: int | None = None,
        event_query: int = 0,
        set_device: int = 0,
        exchange_capture_mode: int = 0,
        device: int = -1,
        huge_pages: bool = False,
    ) -> None:
        if not directories and not host_bytes:
            raise ValueError("a spill store needs a directory or a host tier (host_bytes)")
        if direct not in ("auto", "on", "off"):
            raise ValueError(f"direct must be 'auto', 'on' or 'off', got {direct!r}")
        smallest = stripe if capacity is None else min(stripe, capacity)
        if local_world_size < 1 or host_bytes < 0 or smallest < ALIGNMENT:
            raise ValueError(
                f"invalid sizes: local_world_size={local_world_size} (at least 1), host_bytes={host_bytes} (at least 0),"
                f" stripe={stripe} and capacity={capacity} (at least {ALIGNMENT})"
            )
        memory.check_copies()
        self._lock = make_signal_safe_lock()
        self._submitting = make_signal_safe_lock()
        self._freed: deque[Slot] = deque()
        self._ending: deque[Slot] = deque()
        self._live: set[Slot] = set()
        self.closed = False
        """No memory of the host tier may be touched any more."""
        self._generation = forks.generation()
        self._slabs: list[Slab] = []
        self._host: Arena | None = None
        self._pinned = register is not None
        self._copied_in = self._copied_out = 0  # bytes into and out of the host tier that others have moved
        self._pattern: memory.Map | None = None
        self._filled: deque[tuple[Operation, object]] = deque()  # reads, and what they fill
        try:
            for index, directory in enumerate(Path(d) for d in directories):
                room = capacity if capacity is not None else default_capacity(directory, local_world_size)
                self._slabs.append(Slab(directory, index, room, direct=direct, faults=faults))
            if host_bytes:
                self._host = Arena(host_bytes, register=register, node=node)
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
                huge_pages=huge_pages and memory.huge_pages_enabled(),
            )
        except BaseException:
            for slab in self._slabs:
                slab.close()
            if self._host is not None:
                self._host.close()
            raise
        self.counted_from = self._transfers = self.pool.counters()  # the metrics count what comes later
        if memory.poison_enabled():
            self._pattern = memory.Map(1 << 20, huge_pages=False)
            memory.fill(self._pattern.address, 0xFF, self._pattern.nbytes)
        self._drives = StripedDrives(self._slabs, stripe, self._pattern)
        forks.track(self)
        self._shutdown = weakref.finalize(
            self, _close_parts, self.pool, self._slabs, self._host, self._pattern, self._filled
        )

    def reserve(self, nbytes: int, tier: str | None = None, *, spare: int = 0) -> Slot:
        """Reserve a slot of `nbytes`: in the host tier if it has room, else on drives.

        Args:
            tier: "ssd": prefer a drive, and use the host tier only if no drive has room.
            spare: bytes more of a slot that a device copies to (`Slot.pinned`).

        Raises:
            StoreFull: no tier has room.
            StoreClosed: after close, or in a forked child.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        if self.closed:
            self._check_open()  # before the lock, which a thread of the parent may have held at a fork
        with self._lock:
            if self.closed:
                self._check_open()
            if self._freed or self._ending:
                self._drain()
            slot: Slot | None
            if (host := self._host) is None:
                slot = self._reserve_drives(nbytes)
            elif tier is None and not spare:  # most slots by far
                if (address := host.take(nbytes)) is None:
                    slot = self._reserve_drives(nbytes)
                else:
                    slot = Slot(nbytes, address, self._pinned, ())
            elif tier == "ssd":
                slot = self._reserve_drives(nbytes) or self._reserve_host(nbytes + spare)
            else:
                slot = self._reserve_host(nbytes + spare) or self._reserve_drives(nbytes)
            if slot is None:
                raise no_room(nbytes, self._slabs, self._host)
            self._live.add(slot)
            return slot

    def write(
        self,
        slot: Slot,
        address: int,
        *,
        after_event: int = 0,
        defer: bool = False,
        checksum: int = 0,
        verify: bool = False,
    ) -> Operation:
        """Queue a write of `slot.nbytes` bytes at `address` (any alignment), which must stay valid and unchanged until done.

        A violation is detected: unmapped memory fails the write with EFAULT, and modified bytes make the read raise
        `SourceChanged` by a checksum that is computed here.

        Args:
            after_event: handle of a CUDA event that must complete before the bytes are read; 0: none. It must exist until
                the operation is done. No checksum is computed, because the bytes are not there yet.
            defer: do not wake a worker. The write starts with the next operation that is not deferred, on `wait` or on
                `flush`. Waking a worker takes a core from computation, so small writes are better started together.
            checksum: of an earlier, failed write of the same bytes; 0: compute it.
            verify: have the workers make a checksum of all bytes, behind the event and before they are written. Then a read of
                other bytes fails with `CorruptedData`.
        """
        return self._submit(slot, WRITE, address, after_event, defer, checksum, int(verify))

    def read(self, slot: Slot, address: int, *, defer: bool = False, memory: object = None) -> Operation:
        """Queue a read of a slot, whose write must have succeeded, into `address`.

        Any alignment is allowed; no copy is needed if `address % 4096` equals that of the write
        (`Arena.acquire(page_offset=...)`).

        Args:
            defer: as in `write`.
            memory: the owner of what is read into. It is kept until the read has ended, also where its user is collected as
                garbage meanwhile, and this store with it; None: the caller keeps it.

        Raises:
            ValueError: the slot has no content: no write has succeeded, it has not ended, or the slot was freed.
        """
        if memory is None:
            return self._submit(slot, READ, address, 0, defer, 0, 0)
        with signals_deferred():
            operation = self._submit(slot, READ, address, 0, defer, 0, 0)
            with self._submitting:
                while self._filled and self._filled[0][0].done():
                    self._filled.popleft()
                self._filled.append((operation, memory))
        return operation

    def transfer_device(self, slot: Slot, address: int, *, into: bool, after_event: int = 0) -> Operation:
        """Queue a transfer of device memory into a slot of a drive or out of it: see `ssdtrain.storage.gpudirect`."""
        return self._submit(slot, DEVICE_WRITE if into else DEVICE_READ, address, after_event, False, 0, 0)

    def flush(self) -> None:
        """Start deferred operations. Does nothing after close or in a forked child."""
        if not self.closed and self._generation == forks.generation():
            self.pool.flush()

    def directories(self, slot: Slot) -> list[Path]:
        """Where the bytes of a slot are; [] in the host tier."""
        return [] if slot.tier == "host" else [self._slabs[queue].directory for queue in slot._extents[::3]]

    def free(self, slot: Slot, copied: Event | None = None) -> None:
        """Cancel what has not started, and reuse the space when transfers in flight have ended. Idempotent, never blocks.

        Args:
            copied: the end of the last copy that a device makes to the memory of a pinned slot or from it.
        """
        try:
            del slot._held
        except AttributeError:
            return
        if self._generation != forks.generation():
            return
        for operation in slot._operations:
            operation.cancel()
        slot._copied = copied
        freed = self._freed
        freed.append(slot)
        # Note: [Free never blocks]
        if len(freed) >= FREE_BATCH and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def retire(self, slot: Slot, error: BaseException) -> None:
        """Stop using the drive named by `error`, or the drives of `slot` if it names none. Warns once per drive.

        Stored data stays readable. Errors of a CUDA event or of the host tier retire no drive.
        """
        blameless = slot.tier == "host" or getattr(error, "event_code", 0) != 0
        if blameless or self._generation != forks.generation():
            return
        with self._lock:
            drives = [self._slabs[queue] for queue in slot._extents[::3]]
            named = [slab for slab in drives if str(slab.directory) == getattr(error, "filename", None)]
            for slab in named or drives:
                self._drives.retire(slab, error)

    @property
    def metrics(self) -> StoreMetrics:
        """Current totals. In a forked child those at the fork, with transfers as of the last query before it."""
        if self._generation != forks.generation():
            # No thread changes them, and a thread of the parent may have held the lock
            return self._collect()
        with self._lock:
            if not self.closed:
                self._drain()
            self._transfers = transfers_since(self.pool.counters(), self.counted_from)
            return self._collect()

    def _collect(self) -> StoreMetrics:
        engine, copied = self.pool.engine, (self._copied_in, self._copied_out)
        return StoreMetrics.of(engine, self._slabs, self._host, self._transfers, copied, self._live)

    def close(self) -> None:
        """Cancel what has not started, wait for the rest, and close the files, which frees their space. Idempotent."""
        if self._generation != forks.generation():
            return
        with self._lock:
            self._drain()
            self.closed = True
            self._live.clear()  # there are no files that they could be in
        self._shutdown()

    def __enter__(self) -> SpillStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def after_fork(self) -> None:
        """Close the files in a forked child, so that the child does not keep their space allocated."""
        self.closed = True
        for slab in self._slabs:
            slab.close()

    def _check_open(self) -> None:
        forks.check(self._generation, "this store")
        if self.closed:
            raise StoreClosed("this spill store is closed")

    def _submit(
        self, slot: Slot, kind: int, address: int, event: int, defer: bool, checksum: int, digest: int
    ) -> Operation:
        if self.closed:
            self._check_open()
        if not hasattr(slot, "_held"):
            raise ValueError(f"{slot} was freed and cannot be used")
        extents, nbytes = slot._extents, slot.nbytes
        if reads := kind & 1:
            page_offset, checksum, digest = slot.readable_write()
        else:
            page_offset = address % ALIGNMENT if extents and kind == WRITE else 0
        if not extents:  # in the host tier
            kind = COPY_OUT if reads else COPY_IN
            extents = len(self._slabs), slot.address, nbytes
        # Else the space of a transfer that the slot does not know is used again during it.
        with self._submitting:
            operation = self.pool.submit(
                kind, address, nbytes, page_offset, extents, event, defer, checksum, digest
            )
            slot.record(operation, None if reads else page_offset)
        return operation

    def use_pool(self, pool: Pool) -> None:
        """Use `pool`, which closes the one before when it is closed."""
        self.pool = pool
        self._shutdown.detach()
        self._shutdown = weakref.finalize(
            self, _close_parts, pool, self._slabs, self._host, self._pattern, self._filled
        )

    @property
    def pins_all(self) -> bool:
        """Whether a device copies to and from every slot itself (`Slot.pinned`): there are no drives."""
        return self._pinned and not self._slabs

    def copied_in(self, nbytes: int) -> None:
        """A device copies `nbytes` to a pinned slot of the host tier. Its memory is not used again before the event that `free`
        is given, nor before the operations that the slot has recorded have ended."""
        self._copied_in += nbytes

    def copied_out(self, nbytes: int) -> None:
        """The same of a copy from a pinned slot."""
        self._copied_out += nbytes

    def _reserve_host(self, nbytes: int) -> Slot | None:
        if self._host is None:
            return None
        address = self._host.take(nbytes)
        if address is None:
            return None
        return Slot(nbytes, address, self._pinned, ())

    def _reserve_drives(self, nbytes: int) -> Slot | None:
        if len(self._slabs) > 1 and self._drives.window_over:
            self._drives.observe(self.pool.counters()[0])
        extents = self._drives.reserve(nbytes)
        return None if extents is None else Slot(nbytes, 0, False, extents)

    def _drain(self) -> None:
        ending, freed, host = self._ending, self._freed, self._host
        while freed:
            ending.append(freed.popleft())
        if self.closed:
            return
        for _ in range(len(ending)):
            # Off before its space is freed: an exception of a signal handler may interrupt this; it must not be freed twice.
            slot = ending.popleft()
            if not slot.unused():
                ending.append(slot)
                continue
            if slot.address and host is not None:
                host.put_back(slot.address, slot.nbytes)
            else:
                self._drives.release(slot._extents)
            self._live.remove(slot)


def _close_parts(
    pool: Pool,
    slabs: list[Slab],
    host: Arena | None,
    pattern: memory.Map | None,
    filled: deque[tuple[Operation, object]],
) -> None:
    """Release the parts of a store: on close, garbage collection or interpreter exit. Collected by a worker, or by a thread that
    holds a lock, neither of which may wait for the pool, it is released by a thread of its own."""
    if holds_signal_safe_lock():
        arguments = pool, slabs, host, pattern, filled
        threading.Thread(target=_close_parts, args=arguments, name="ssdtrain-close").start()
        return
    with ExitStack() as closing:  # all are closed, the last first, whatever one of them raises
        if pattern is not None:
            closing.callback(pattern.close)
        if host is not None:
            closing.callback(host.close, force=True)
        for slab in slabs:
            closing.callback(slab.close)
        closing.callback(filled.clear)
        closing.callback(pool.close)
