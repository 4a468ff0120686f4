"""Host buffers of the offload engine: one fixed map, leased in ranges.

Note: [Who may run what] A lease is given back from anywhere: a worker, a finalizer in the middle of a cyclic
collection, a thread that holds this arena's lock. So a release only appends to a deque; whoever next acquires
or asks for figures drains it.
"""

import weakref
from collections import deque
from collections.abc import Callable

from ssdtrain.storage import forks, memory
from ssdtrain.storage.allocator import RangeAllocator
from ssdtrain.storage.errors import StoreClosed
from ssdtrain.storage.memory import ALIGNMENT
from ssdtrain.storage.section import make_section


class _Given(weakref.ref[memoryview]):
    """A view that owns a lease."""

    __slots__ = ("lease",)

    lease: "Lease"


Register = Callable[[int, int], Callable[[], None]]


class Lease:
    """`nbytes` bytes of an arena at `address`, held until `release`, or until the memoryview that `give`
    returned dies.
    """

    __slots__ = ("_arena", "_held", "address", "nbytes")

    def __init__(self, arena: "Arena", offset: int, address: int, nbytes: int) -> None:
        self._arena = arena
        self._held = [offset]
        self.address = address
        self.nbytes = nbytes

    def view(self) -> memoryview:
        """Exactly the bytes of this lease, writable. The view does not keep the lease: see `give`."""
        return memory.view(self.address, self.nbytes)

    def give(self) -> memoryview:
        """A view that owns the lease: it is released when the view and every buffer made from it are dead.

        `torch.frombuffer` keeps the memoryview that it was given, so the lease lives as long as the last
        tensor of that storage.
        """
        view = self.view()
        self._arena._watch(view, self)
        return view

    def release(self) -> None:
        """Give the bytes back. Idempotent, takes no lock, may run in any thread and inside a finalizer."""
        try:
            offset = self._held.pop()
        except IndexError:
            return
        self._arena._given_back(offset, self.address, self.nbytes)


class Arena:
    """A fixed piece of host memory on huge pages, leased out in ranges that are aligned for O_DIRECT.
    Thread-safe.

    Args:
        nbytes: size, rounded up to the huge page (2 MiB). Pages are taken when first touched, then kept.
        huge_pages: ask for them; they cost a third of the CPU per transferred byte.
        register: called once with (address, bytes) of the whole map, for example to pin it by
            cudaHostRegister; returns what
            undoes it.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True, register: Register | None = None) -> None:
        if nbytes <= 0:
            raise ValueError(f"an arena needs a positive size, got {nbytes} bytes")
        self._map = memory.Map(nbytes, huge_pages=huge_pages)
        try:
            self._unregister = register(self._map.address, self._map.nbytes) if register else None
        except BaseException:
            self._map.close()
            raise
        self.capacity = self._map.nbytes
        self.peak = 0
        self._allocator = RangeAllocator(self.capacity, ALIGNMENT)
        self._lock = make_section()
        self._returned: deque[tuple[int, int, int]] = deque()
        # Views that own a lease, and those of them that died: C code appends them. A finalizer in Python would lose the
        # exception of a signal (Ctrl-C) that is handled in it.
        self._given: dict[int, _Given] = {}
        self._dead: deque[_Given] = deque()
        self._poison = memory.poisoned()
        self._closed = False
        self._generation = forks.generation()

    def acquire(self, nbytes: int, *, lead: int = 0) -> Lease | None:
        """A lease of `nbytes` with `address % ALIGNMENT == lead`, or None where no range is free. Never
        waits.

        Raises:
            StoreClosed: the arena was closed, or this is a forked child.
        """
        if not 0 <= lead < ALIGNMENT:
            raise ValueError(f"lead is an offset within {ALIGNMENT} bytes, got {lead}")
        forks.check(self._generation, "this arena")
        with self._lock:
            if self._closed:
                raise StoreClosed("this arena is closed")
            if self._dead or self._returned:
                self._drain()
            offset = self._allocator.take(nbytes + lead)
            if offset is None:
                return None
            if self._allocator.used > self.peak:
                self.peak = self._allocator.used
        return Lease(self, offset, self._map.address + offset + lead, nbytes)

    @property
    def allocated(self) -> int:
        """Bytes leased out now, as counted by the allocator (multiples of 4096)."""
        if self._generation != forks.generation():
            return 0
        with self._lock:
            self._drain()
            return self._allocator.used

    @property
    def address(self) -> int:
        return self._map.address

    def close(self, *, force: bool = False) -> None:
        """Lease nothing more, unmap when the last lease is back, with `force` at once. Idempotent."""
        if self._generation != forks.generation():
            return
        with self._lock:
            self._drain()
            self._closed = True
            for given in list(self._given.values()):
                if (view := given()) is not None:
                    # From now on nobody drains but who gives back.
                    weakref.finalize(view, given.lease.release).atexit = False
            self._unmap(force)

    def _given_back(self, offset: int, address: int, nbytes: int) -> None:
        self._returned.append((offset, address, nbytes))
        # Once closed nobody acquires, so nobody else would drain. See Note: [Who may run what] for why this
        # cannot wait.
        if self._closed and self._generation == forks.generation() and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _watch(self, view: memoryview, lease: Lease) -> None:
        given = _Given(view, self._dead.append)
        given.lease = lease
        self._given[id(given)] = given

    def _drain(self) -> None:
        while self._dead:
            given = self._dead.popleft()
            del self._given[id(given)]
            given.lease.release()
        while self._returned:
            offset, address, nbytes = self._returned.popleft()
            self._allocator.give(offset)
            if self._poison and self._map.nbytes:
                memory.fill(address, 0xFF, nbytes)
        self._unmap(False)

    def _unmap(self, force: bool) -> None:
        if self._closed and (force or not self._allocator.used) and self._map.nbytes:
            if self._unregister is not None:
                self._unregister()
            self._map.close()
