"""The pure Python I/O engine: the reference, and what runs where no compiler was. Same interface as the C
pool.

Threads: each drive has its own workers; they share `PythonPool._lock`, held for queue and counter changes
only, never during a transfer. `cancel` takes no lock, because it may run in a finalizer on a thread that
holds it: worker and canceller race for one `dict.setdefault`, which is atomic.
"""

import copy
import ctypes
import errno
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ssdtrain.storage import faults as fault
from ssdtrain.storage import forks
from ssdtrain.storage.errors import IOCancelled, IOFailure, StoreClosed
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.pieces import COPY_IN, READ, WRITE, Piece, cut
from ssdtrain.storage.python_transfer import ERRNO, EVENT, Transfer, TransferError

logger = logging.getLogger(__name__)

MakeError = Callable[[int, int, int, int, int, int], IOFailure]
_WORKER = object()


class PythonOperation:
    """One write, read or copy. Thread-safe; see `ssdtrain.storage.pool.Operation` for the meaning of each
    method.
    """

    __slots__ = (
        "_begun", "_done", "_error", "_generation", "_latch", "_owner", "_pool", "_remaining",
        "address", "event", "kind", "lead", "nbytes", "pieces", "seconds", "serial",
    )  # fmt: skip

    def __init__(
        self, pool: "PythonPool", kind: int, address: int, nbytes: int, lead: int, event: int
    ) -> None:
        self.kind, self.address, self.nbytes, self.lead, self.event = kind, address, nbytes, lead, event
        self.serial = self.pieces = self._remaining = 0
        self.seconds = 0.0
        self._begun = 0.0
        self._pool = pool
        self._error: IOFailure | None = None
        self._done = False
        self._owner: dict[str, object] = {}
        self._latch = threading.Lock()
        self._latch.acquire()
        self._generation = forks.generation()

    def done(self) -> bool:
        if not self._done:
            forks.check(self._generation, "this operation")
        return self._done

    def begun(self) -> bool:
        return self._owner.get("by") is _WORKER

    def wait(self, timeout: float | None = None) -> bool:
        if not self._done:
            forks.check(self._generation, "this operation")
            self._pool.kick()  # also where it has begun: pieces on another drive may have been queued for later
            if not self._latch.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                return False
            self._latch.release()
        if self._error is not None:
            # A copy each time: a raised error holds its traceback, and the operation must not.
            raise copy.copy(self._error)
        if self._owner.get("by") is not _WORKER:
            raise IOCancelled(f"this operation of {self.nbytes} bytes was cancelled: nothing was transferred")
        return True

    def cancel(self) -> bool:
        forks.check(self._generation, "this operation")
        me = object()
        owner = self._owner.setdefault("by", me)
        if owner is me:
            self._pool._cancelled.append((self.kind, self.nbytes))
            self._finish()
        return owner is not _WORKER

    def failed(self) -> IOFailure | None:
        return copy.copy(self._error) if self.done() else None

    def _claim(self) -> bool:
        """Worker: whether the operation may run, because a worker began it before or begins it now."""
        return self._owner.setdefault("by", _WORKER) is _WORKER

    def _finish(self) -> None:
        self._done = True
        self._latch.release()


class _Queue:
    """Pieces for one drive or for host memory, and what was counted there. Changed under the pool's lock."""

    def __init__(self, lock: threading.Lock, fd: int, direct: bool) -> None:
        self.ready = threading.Condition(lock)
        self.waiting: tuple[deque[tuple[PythonOperation, int, Piece]], ...] = (deque(), deque())
        self.fd, self.direct = fd, direct
        self.bytes = [0, 0]
        self.seconds = [0.0, 0.0]
        self.active = [0, 0]
        self.since = [0.0, 0.0]
        self.later = 0  # pieces for which nobody was woken yet

    def wake(self) -> None:
        if self.later:
            self.ready.notify(self.later)
            self.later = 0

    def begin(self, direction: int) -> None:
        if not self.active[direction]:
            self.since[direction] = time.perf_counter()
        self.active[direction] += 1

    def end(self, direction: int, nbytes: int) -> None:
        self.bytes[direction] += nbytes
        self.active[direction] -= 1
        if not self.active[direction]:
            self.seconds[direction] += time.perf_counter() - self.since[direction]


class PythonPool:
    """Workers of the Python engine. The arguments are those of `ssdtrain.storage.pool.make_pool`."""

    engine = "python"

    def __init__(
        self,
        files: Sequence[tuple[int, bool]],
        *,
        threads: int,
        host_threads: int,
        piece: int,
        make_error: MakeError,
        faults: Faults | None = None,
        event_wait: int = 0,
        set_device: int = 0,
        device: int = -1,
    ) -> None:
        self._piece, self._faults, self._make_error = piece, faults, make_error
        self._wait_event = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(event_wait) if event_wait else None
        self._set_device = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(set_device) if set_device else None
        self._device = device
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._queues = [_Queue(self._lock, fd, direct) for fd, direct in [*files, (-1, False)]]
        self._cancelled: deque[tuple[int, int]] = deque()
        self._cancelled_bytes = 0
        self._serials = [0, 0, 0, 0]
        self._held = [False, False]
        self._held_begun = [False, False]
        self._closed = False
        self._generation = forks.generation()
        counts = [threads] * len(files) + [host_threads]
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name="ssdtrain-io", daemon=True)
            for queue, count in enumerate(counts)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        kind: int,
        address: int,
        nbytes: int,
        lead: int,
        extents: Sequence[int],
        event: int = 0,
        later: bool = False,
    ) -> PythonOperation:
        """Queue an operation. `later`: no worker is woken for it, until the next operation without it, a wait for one,
        or `kick`; one that is awake takes it all the same.
        """
        forks.check(self._generation, "this I/O pool")
        operation = PythonOperation(self, kind, address, nbytes, lead, event)
        pieces = list(enumerate(cut(extents, lead, nbytes, self._piece)))
        operation.pieces = operation._remaining = len(pieces)
        with self._lock:
            if self._closed:
                raise StoreClosed("this I/O pool is closed")
            operation.serial = self._serials[kind]
            self._serials[kind] += 1
            if self._faults is not None and self._faults.torn:
                self._shuffle(operation, pieces)
            for index, piece in pieces:
                queue = self._queues[piece.queue]
                queue.waiting[kind & 1].append((operation, index, piece))
                queue.later += 1
            if not later:
                self._wake()
        if not pieces and operation._claim():
            operation._finish()
        return operation

    def hold(self, *, begun: bool = False, writes: bool = True, reads: bool = True) -> None:
        """Tests: let no operation begin; with `begun`, let it begin (it can no longer be cancelled) but
        transfer nothing.
        """
        forks.check(self._generation, "this I/O pool")
        with self._lock:
            held = self._held_begun if begun else self._held
            held[:] = [held[0] or writes, held[1] or reads]

    def kick(self) -> None:
        """Wake workers for what was submitted for later."""
        forks.check(self._generation, "this I/O pool")
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        for queue in self._queues:
            queue.wake()

    def release(self) -> None:
        """Undo every `hold`."""
        forks.check(self._generation, "this I/O pool")
        with self._lock:
            self._release()

    def counters(self) -> tuple[list[tuple[int, int, float, float]], int]:
        """Per queue (bytes written, bytes read, seconds writing, seconds reading), the host last; and bytes
        cancelled.
        """
        forks.check(self._generation, "this I/O pool")
        with self._lock:
            while self._cancelled:
                self._cancelled_bytes += self._cancelled.popleft()[1]
            queues = [(q.bytes[0], q.bytes[1], q.seconds[0], q.seconds[1]) for q in self._queues]
        return queues, self._cancelled_bytes

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, end the workers. Idempotent; does nothing in a forked
        child.
        """
        if self._generation != forks.generation():
            return
        with self._lock:
            self._closed = True
            for queue in self._queues:
                for waiting in queue.waiting:
                    for operation, _, _ in waiting:
                        operation.cancel()
            self._release()
            for queue in self._queues:
                queue.ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _release(self) -> None:
        self._held[:] = self._held_begun[:] = [False, False]
        for queue in self._queues:
            queue.ready.notify_all()
        self._released.notify_all()

    def _shuffle(self, operation: PythonOperation, pieces: list[tuple[int, Piece]]) -> None:
        assert self._faults is not None
        for last in range(len(pieces) - 1, 0, -1):
            at = fault.hashed(self._faults.seed, fault.SHUFFLE, operation.kind, operation.serial, last, 0) % (
                last + 1
            )
            pieces[last], pieces[at] = pieces[at], pieces[last]

    def _take(self, queue: _Queue) -> tuple[PythonOperation, int, Piece] | None:
        """The next piece, reads first because an unpack waits for them; None when there is nothing more to
        come.
        """
        while True:
            for direction in (1, 0):
                if queue.waiting[direction] and not self._held[direction]:
                    return queue.waiting[direction].popleft()
            if self._closed:
                return None
            queue.ready.wait()

    def _work(self, number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        queue = self._queues[number]
        transfer = Transfer(self._faults)
        current_device = False
        try:
            while True:
                with self._lock:
                    taken = self._take(queue)
                    if taken is None:
                        return
                    operation, index, piece = taken
                    del taken
                    if not operation._claim():
                        continue
                    direction = operation.kind & 1
                    while self._held_begun[direction]:
                        self._released.wait()
                    skip = operation._error is not None
                error = None
                if operation.event and not skip:
                    error = self._await_event(operation, piece, number, current_device)
                    current_device = True
                with self._lock:
                    operation._begun = operation._begun or time.perf_counter()
                    queue.begin(direction)
                if error is None and not skip:
                    try:
                        transfer.run(operation, index, piece, queue.fd, queue.direct)
                    except TransferError as failure:
                        error = self._make_error(
                            operation.kind,
                            number,
                            failure.code,
                            failure.detail,
                            failure.offset,
                            piece.end - piece.start,
                        )
                    except Exception:
                        # A fault of the program: who waits must hear of it, and the worker live on.
                        logger.exception("a worker of the I/O pool failed")
                        error = self._make_error(
                            operation.kind, number, errno.EIO, ERRNO, piece.offset, piece.end - piece.start
                        )
                self._ended(operation, piece, queue, error, skip)
                del operation, error
        finally:
            transfer.close()

    def _await_event(
        self, operation: PythonOperation, piece: Piece, queue: int, current: bool
    ) -> IOFailure | None:
        code = 0
        if self._set_device is not None and not current:
            code = self._set_device(self._device)
        if not code and self._wait_event is not None:
            code = self._wait_event(operation.event)
        return (
            self._make_error(operation.kind, queue, code, EVENT, piece.offset, operation.nbytes)
            if code
            else None
        )

    def _ended(
        self, operation: PythonOperation, piece: Piece, queue: _Queue, error: IOFailure | None, skip: bool
    ) -> None:
        with self._lock:
            moved = 0 if skip or error is not None else piece.end - max(piece.start, operation.lead)
            queue.end(operation.kind & 1, moved)
            operation._error = operation._error or error
            operation._remaining -= 1
            if not operation._remaining:
                operation.seconds = time.perf_counter() - operation._begun
                operation._finish()


assert (WRITE & 1, READ & 1, COPY_IN & 1) == (0, 1, 0) and ERRNO == 0
