"""The pure Python I/O engine: the reference implementation, used where the C engine was not built. Same interface.

Threads: each drive has its own workers, and one thread polls events (of device memory two, one for each direction). They
share `PythonPool._lock`, which is held for changes of queues and counters only, never during a transfer.
"""

import errno
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from ssdtrain.patience import Patience
from ssdtrain.storage import faults as fault
from ssdtrain.storage import forks, memory
from ssdtrain.storage.errors import IOFailure, SourceChanged, StoreClosed
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.pieces import COPY_IN, READ, WRITE, Piece, cut
from ssdtrain.storage.python_events import EventWaiter
from ssdtrain.storage.python_operation import PythonOperation
from ssdtrain.storage.python_transfer import CHANGED, CORRUPTED, ERRNO, EVENT, Transfer, TransferError
from ssdtrain.storage.signal_safe_lock import make_signal_safe_lock, mark_worker

logger = logging.getLogger(__name__)

MakeError = Callable[[int, int, int, int, int, int], IOFailure | SourceChanged]


class PieceTransfer(Protocol):
    """Transfers the pieces that one worker takes."""

    def run(self, operation: PythonOperation, index: int, piece: Piece, fd: int, direct: bool) -> None: ...
    def close(self) -> None: ...


class _Queue:
    """Queued pieces and counters of one drive or of host memory. Guarded by the pool's lock."""

    def __init__(self, lock: Any, fd: int, direct: bool, limit: int) -> None:
        self.ready = threading.Condition(lock)
        self.limit = limit  # concurrent pieces per direction; one worker more exists, so that reads never wait for writes
        self.working = [0, 0]
        self.waiting: tuple[deque[tuple[PythonOperation, int, Piece]], ...] = (deque(), deque())
        self.fd, self.direct = fd, direct
        self.bytes = [0, 0]
        self.seconds = [0.0, 0.0]
        self.active = [0, 0]
        self.since = [0.0, 0.0]
        self.deferred = 0  # pieces queued without waking a worker

    def figures(self) -> tuple[int, int, float, float]:
        """Bytes written and read, and seconds with at least one such transfer under way, up to now."""
        now = time.perf_counter()
        write, read = (
            seconds + (now - since if active else 0.0)
            for seconds, active, since in zip(self.seconds, self.active, self.since, strict=True)
        )
        return self.bytes[0], self.bytes[1], write, read

    def wake(self) -> None:
        if self.deferred:
            self.ready.notify(self.deferred)
            self.deferred = 0

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
    """Workers of the Python engine. The arguments are those of `ssdtrain.storage.pool.make_pool`, and one:

    Args:
        make_transfer: called by each worker, transfers its pieces. None: host memory, by system calls.
    """

    engine = "python"

    def __init__(
        self,
        files: Sequence[tuple[int, bool]],
        *,
        threads: int,
        host_threads: int,
        piece: int,
        make_error: MakeError,
        make_transfer: Callable[[], PieceTransfer] | None = None,
        faults: Faults | None = None,
        event_query: int = 0,
        set_device: int = 0,
        exchange_capture_mode: int = 0,
        device: int = -1,
    ) -> None:
        self._piece, self._faults, self._make_error = piece, faults, make_error
        self._in_host_memory = make_transfer is None
        self._make_transfer = make_transfer or (lambda: Transfer(faults))
        # Signal-safe, so that a finalizer can detect that its thread holds it: see `holds_signal_safe_lock`.
        self._lock = cast(Any, make_signal_safe_lock())
        self._released = threading.Condition(self._lock)
        limits = [threads] * len(files) + [host_threads]
        self._queues = [
            _Queue(self._lock, fd, direct, limit)
            for (fd, direct), limit in zip([*files, (-1, False)], limits, strict=True)
        ]
        self._cancelled: deque[tuple[int, int]] = deque()
        self._cancelled_bytes = 0
        self._pieces_ended = 0
        self._serials = [0, 0, 0, 0]
        self.digests = threading.Lock()  # of operations; workers add to them
        self._held = [False, False]
        self._held_begun = [False, False]
        self._closed = False
        self._generation = forks.generation()
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name="ssdtrain-io", daemon=True)
            for queue, limit in enumerate(limits)
            for _ in range(limit + 1 if limit else 0)
        ]
        for thread in self._threads:
            thread.start()
        # Of writes and of reads: a read must not wait for the events of writes. Reads of host memory have none.
        self._events = [
            EventWaiter(event_query, set_device, exchange_capture_mode, device, self._event_completed)
            for _ in range(0 if not event_query else 1 if self._in_host_memory else 2)
        ]

    def submit(
        self,
        kind: int,
        address: int,
        nbytes: int,
        page_offset: int,
        extents: Sequence[int],
        event: int = 0,
        defer: bool = False,
        checksum: int = 0,
        digest: int = 0,
    ) -> PythonOperation:
        """Queue an operation.

        Args:
            kind: WRITE, READ, COPY_IN or COPY_OUT.
            address, nbytes: memory range.
            page_offset, extents: see `ssdtrain.storage.pieces`.
            event: CUDA event that must complete first; 0: none.
            defer: wake no worker. The operation starts with the next one that is not deferred, on `wait` or on `flush`, or
                when an active worker reaches it.
            checksum: expected checksum of a read, or known checksum of a write; 0: a write computes it (`memory.sample`).
            digest: expected checksum of all bytes of a read; of a write, other than 0: workers compute it before they write.
                0: none.
        """
        forks.check(self._generation, "this I/O pool")
        if event and not self._events:
            raise ValueError("an operation with an event needs a pool with event_query")
        if (
            self._in_host_memory and not (checksum or kind & 1 or event) and nbytes
        ):  # before the event completes the bytes are not there
            checksum = memory.sample(address, nbytes)
        operation = PythonOperation(self, kind, address, nbytes, page_offset, event, checksum, digest)
        pieces = list(enumerate(cut(extents, page_offset, nbytes, self._piece)))
        operation.pieces = operation._remaining = len(pieces)
        operation.first = pieces[0][1] if pieces else None
        with self._lock:
            if self._closed:
                raise StoreClosed("this I/O pool is closed")
            operation.serial = self._serials[kind]
            self._serials[kind] += 1
            if self._faults is not None and self._faults.torn:
                self._shuffle(operation, pieces)
            if event and pieces:
                operation._pending_pieces = pieces
                self._waiter(kind).submit(operation)
            else:
                self._append(operation, pieces)
                if not defer:
                    self._wake()
        if not pieces and operation._claim():
            operation._finish()
        return operation

    def _append(self, operation: PythonOperation, pieces: list[tuple[int, Piece]]) -> None:
        for index, piece in pieces:
            queue = self._queues[piece.queue]
            queue.waiting[operation.kind & 1].append((operation, index, piece))
            queue.deferred += 1

    def _event_completed(self, operation: PythonOperation, code: int) -> None:
        """Queue the operation, or fail it. Called by the event waiter."""
        with self._lock:
            if self._closed:
                operation.cancel()
            elif not code:
                self._append(operation, operation._pending_pieces)
                self._wake()
            elif operation._claim():
                _, piece = operation._pending_pieces[0]
                operation._error = self._make_error(
                    operation.kind, piece.queue, code, EVENT, piece.offset, operation.nbytes
                )
                operation._finish()

    def wait_for_event_query(self, operation: PythonOperation) -> None:
        """Block until the event of a cancelled operation is no longer queried."""
        if self._events:
            self._waiter(operation.kind).wait_for_query(operation)

    def _waiter(self, kind: int) -> EventWaiter:
        return self._events[(kind & 1) % len(self._events)]

    def hold(self, *, begun: bool = False, writes: bool = True, reads: bool = True) -> None:
        """Tests: prevent operations from starting; with `begun`, let them start (so that they can no longer be cancelled)
        but transfer nothing.
        """
        forks.check(self._generation, "this I/O pool")
        with self._lock:
            held = self._held_begun if begun else self._held
            held[:] = [held[0] or writes, held[1] or reads]

    def flush(self) -> None:
        """Wake workers for deferred operations."""
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
        """([(bytes written, bytes read, seconds writing, seconds reading) per queue, host memory last], bytes cancelled)."""
        forks.check(self._generation, "this I/O pool")
        with self._lock:
            while self._cancelled:
                self._cancelled_bytes += self._cancelled.popleft()[1]
            queues = [queue.figures() for queue in self._queues]
        return queues, self._cancelled_bytes

    def close(self) -> None:
        """Cancel what has not started, wait for the rest, end the workers. Idempotent; does nothing in a forked child."""
        self.close_within(None)

    def close_within(self, timeout: float | None) -> bool:
        """`close`, but give up when no piece has ended for `timeout` seconds. False: a thread is still in a transfer or queries
        an event."""
        if self._generation != forks.generation():
            return True
        with self._lock:
            self._closed = True
            for queue in self._queues:
                for waiting in queue.waiting:
                    for operation, _, _ in waiting:
                        operation.cancel()
            self._release()
            for queue in self._queues:
                queue.ready.notify_all()
        for waiter in self._events:
            waiter.close()
        threads = [*(waiter.thread for waiter in self._events), *self._threads]
        if timeout is None:
            for thread in threads:
                thread.join()
            return True
        patience = Patience(timeout, lambda: self._pieces_ended)
        return all(patience.wait(partial(_joined, thread)) for thread in threads)

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
        """The next piece, reads first because backward waits for them; None after close."""
        while True:
            for direction in (1, 0):
                if not queue.waiting[direction] or queue.working[direction] >= queue.limit:
                    continue
                if not self._held[direction] or self._closed:
                    return queue.waiting[direction].popleft()
            if self._closed:
                return None
            queue.ready.wait()

    def _work(self, number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        mark_worker()
        queue = self._queues[number]
        transfer = self._make_transfer()
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
                    queue.working[direction] += 1
                    while self._held_begun[direction]:
                        self._released.wait()
                    skip = operation._error is not None
                error = None
                with self._lock:
                    operation.began = operation.began or time.perf_counter()
                    queue.begin(direction)
                if not skip:
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
                        # A bug: report it to whoever waits, and keep the worker running.
                        logger.exception("a worker of the I/O pool failed")
                        error = self._make_error(
                            operation.kind, number, errno.EIO, ERRNO, piece.offset, piece.end - piece.start
                        )
                self._ended(operation, piece, queue, error, skip)
                del operation, error
        finally:
            transfer.close()

    def _ended(
        self,
        operation: PythonOperation,
        piece: Piece,
        queue: _Queue,
        error: IOFailure | SourceChanged | None,
        skip: bool,
    ) -> None:
        with self._lock:
            queue.working[operation.kind & 1] -= 1
            self._pieces_ended += 1
            moved = 0 if skip or error is not None else piece.end - max(piece.start, operation.page_offset)
            queue.end(operation.kind & 1, moved)
            operation._error = operation._error or error
            operation._remaining -= 1
            last = not operation._remaining
        if not last:
            return
        if operation.kind & 1 and operation._error is None:
            self._verify(operation)
        with self._lock:
            operation.seconds = time.perf_counter() - operation.began
            operation._finish()

    def _verify(self, operation: PythonOperation) -> None:
        """Fail a read whose bytes differ from those written, or else from those submitted for writing."""
        detail = 0
        if operation.digesting and operation.digest != operation.expected:
            detail = CORRUPTED
        elif operation.checksum and memory.sample(operation.address, operation.nbytes) != operation.checksum:
            detail = CHANGED
        first = operation.first
        if detail and first is not None:
            operation._error = self._make_error(
                operation.kind, first.queue, errno.EIO, detail, first.offset, operation.nbytes
            )


def _joined(thread: threading.Thread, timeout: float) -> bool:
    """Wait for the end of `thread`. False: it has not ended."""
    thread.join(timeout)
    return not thread.is_alive()


assert (WRITE & 1, READ & 1, COPY_IN & 1) == (0, 1, 0) and ERRNO == 0
