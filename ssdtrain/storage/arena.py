"""Host buffers of the offload engine: one fixed memory map, leased in ranges.

Note: [Release from finalizers]
    A lease may be released by a worker, by a finalizer during a garbage collection, or by a thread that already holds this
    arena's lock. `release` therefore only appends to a deque, which the next `acquire` or query drains.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable

from ssdtrain.storage import forks, memory
from ssdtrain.storage.allocator import RangeAllocator
from ssdtrain.storage.errors import StoreClosed
from ssdtrain.storage.memory import ALIGNMENT
from ssdtrain.storage.records import record
from ssdtrain.storage.signal_safe_lock import make_signal_safe_lock

logger = logging.getLogger(__name__)


class _OwningView(weakref.ref[memoryview]):
    """Weak reference to a memoryview that owns a lease."""

    __slots__ = ("lease",)

    lease: "Lease"


Register = Callable[[int, int], Callable[[], None]]


@record(collected=True)
class Lease:
    """`nbytes` bytes of an arena at `address`, held until `release` or until the memoryview that `owning_view` returned is
    destroyed.
    """

    _arena: "Arena"
    _start: int
    """Deleted when it is released, once."""
    address: int
    nbytes: int

    def view(self) -> memoryview:
        """The bytes of this lease as a writable view, which does not keep the lease alive: see `owning_view`."""
        return memory.view(self.address, self.nbytes)

    def owning_view(self) -> memoryview:
        """A view that owns the lease, which is released when the view and every buffer made from it are destroyed.

        `torch.frombuffer` keeps a reference to the memoryview, so the lease lives as long as the tensor's storage.
        """
        view = memory.view(self.address, self.nbytes)
        self._arena._watch(view, self)
        return view

    def release(self) -> None:
        """Release the bytes. Idempotent and lock-free; may run on any thread and in a finalizer."""
        try:
            start = self._start
            del self._start
        except AttributeError:
            return
        arena = self._arena
        arena._returned.append((start, self.address, self.nbytes))
        if arena._closed:
            arena._drain_closed()


class Arena:
    """A fixed amount of host memory on huge pages, leased in ranges aligned for O_DIRECT. Thread-safe.

    Args:
        nbytes: size in bytes, rounded up to the huge page (2 MiB). Pages are allocated at first touch and kept.
        huge_pages: request huge pages, which need a third of the CPU time per transferred byte.
        register: called once as `register(address, nbytes)` with the whole map, for example to pin it with
            cudaHostRegister. Returns a function that undoes it; if that raises TimeoutError, the memory stays.
        node: NUMA node of the pages; None: that of the calling thread.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: bool = True,
        register: Register | None = None,
        node: int | None = None,
    ) -> None:
        if nbytes <= 0:
            raise ValueError(f"arena size must be positive, got {nbytes} bytes")
        self._map = memory.Map(nbytes, huge_pages=huge_pages, node=node)
        try:
            self._unregister = register(self._map.address, self._map.nbytes) if register else None
        except BaseException:
            self._map.close()
            raise
        self.capacity = self._map.nbytes
        self.peak = 0
        self._allocator = RangeAllocator(self.capacity, ALIGNMENT, self._map.address)
        self.take = self._allocator.allocate
        """`take(nbytes)`: the address of a free range, or None. For the one owner of an arena, who calls this and `put_back`
        with a lock of its own held, and takes no lease."""
        self._lock = make_signal_safe_lock()
        self._returned: deque[tuple[int, int, int]] = deque()
        # Views that own a lease, and those of them that were destroyed. The weak reference's callback is a C function: a
        # Python finalizer would swallow the exception of a signal handler (Ctrl-C) that runs inside it.
        self._owning_views: dict[int, _OwningView] = {}
        self._dead: deque[_OwningView] = deque()
        self._poison = memory.poison_enabled()
        self._closed = False
        self._generation = forks.generation()

    def acquire(self, nbytes: int, *, page_offset: int = 0) -> Lease | None:
        """Lease `nbytes` with `address % ALIGNMENT == page_offset`. Never blocks.

        Returns:
            The lease, or None if no free range is large enough.

        Raises:
            StoreClosed: the arena was closed, or this is a forked child process.
        """
        if not 0 <= page_offset < ALIGNMENT:
            raise ValueError(f"page_offset must be in [0, {ALIGNMENT}), got {page_offset}")
        forks.check(self._generation, "this arena")
        with self._lock:
            if self._closed:
                raise StoreClosed("this arena is closed")
            if self._dead or self._returned:
                self._drain()
            start = self._allocator.allocate(nbytes + page_offset)
            if start is None:
                return None
            if self._allocator.used > self.peak:
                self.peak = self._allocator.used
        return Lease(self, start, start + page_offset, nbytes)

    def put_back(self, address: int, nbytes: int) -> None:
        """Free a range that `take` returned."""
        self._allocator.free(address)
        if self._poison:
            memory.fill(address, 0xFF, nbytes)

    @property
    def allocated(self) -> int:
        """Bytes currently leased, in multiples of 4096."""
        if self._generation != forks.generation():
            return 0
        with self._lock:
            self._drain()
            used = self._allocator.used
        self._drain_closed()
        return used

    @property
    def address(self) -> int:
        return self._map.address

    @property
    def mapped(self) -> bool:
        """Whether its memory is still there: after `close` until the last lease has been released."""
        return bool(self._map.nbytes)

    def close(self, *, force: bool = False) -> None:
        """Refuse further leases; unmap when the last lease is released, or immediately with `force`. Idempotent."""
        if self._generation != forks.generation():
            return
        with self._lock:
            self._drain()
            self._closed = True
            for ref in list(self._owning_views.values()):
                if (view := ref()) is not None:
                    # After close only `release` drains.
                    weakref.finalize(view, ref.lease.release).atexit = False
            self._unmap(force)
        self._drain_closed()

    def _drain_closed(self) -> None:
        """After close no `acquire` drains any more. Must not block: Note: [Release from finalizers]. Whoever has
        the lock looks again when it has let go of it."""
        if self._generation != forks.generation():
            return
        while self._closed and self._returned and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _watch(self, view: memoryview, lease: Lease) -> None:
        ref = _OwningView(view, self._dead.append)
        ref.lease = lease
        self._owning_views[id(ref)] = ref

    def _drain(self) -> None:
        while self._dead:
            ref = self._dead.popleft()
            del self._owning_views[id(ref)]
            ref.lease.release()
        while self._returned:
            start, address, nbytes = self._returned.popleft()
            self._allocator.free(start)
            if self._poison and self.mapped:
                memory.fill(address, 0xFF, nbytes)
        if self._closed:
            self._unmap(False)

    def _unmap(self, force: bool) -> None:
        if not (force or not self._allocator.used) or not self.mapped:
            return
        try:
            if self._unregister is not None:
                self._unregister()
        except TimeoutError as error:  # the device may still copy to or from it
            logger.warning(
                "%d bytes of pinned memory stay until the process ends: %s", self._map.nbytes, str(error)
            )
            self._map.abandon()
            return
        self._map.close()
