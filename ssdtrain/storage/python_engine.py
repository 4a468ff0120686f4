"""The I/O engine in Python, used where the C engine was not built: the same interface and guarantees, but slower.

Every byte of a drive goes through a bounce buffer of the worker that transfers it, so that any memory address suits O_DIRECT, and
what is digested is what is written or was read. Deferred operations start at once, and no faults can be injected.

Threads: each drive and the host memory have workers for writes and others for reads, so that a read never waits for a write. One
thread polls CUDA events (of device memory two, one for each direction). `PythonPool._lock` guards counters and the end of
operations; it is never held during a transfer. `cancel` takes no lock, because it may run in a finalizer on a thread that holds
one: worker and canceller race for an atomic `dict.setdefault`.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import logging
import mmap
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any

from ssdtrain.patience import Patience
from ssdtrain.storage import forks, memory
from ssdtrain.storage.errors import IOCancelled, IOFailure, SourceChanged, StoreClosed
from ssdtrain.storage.faults import mix
from ssdtrain.storage.memory import ALIGNMENT
from ssdtrain.storage.pieces import (
    COPY_IN,
    CORRUPTED,
    END_OF_FILE,
    ERRNO,
    EVENT,
    NOTHING_WRITTEN,
    READ,
    SOURCE_CHANGED,
    WRITE,
    ImagePiece,
    Request,
    TransferError,
    cut,
)
from ssdtrain.storage.signal_safe_lock import make_signal_safe_lock, mark_worker

logger = logging.getLogger(__name__)

MakeError = Callable[[int, int, int, int, int, int], IOFailure | SourceChanged]

BOUNCE = 1 << 20
"""Size of a worker's bounce buffer, in bytes."""
_SECTOR = 512
"""Granularity of a short O_DIRECT transfer, in bytes."""

EVENT_NOT_READY = 600
"""cudaErrorNotReady."""
RELAXED_CAPTURE = 2
"""cudaStreamCaptureModeRelaxed: queries by this thread do not invalidate a capture of another thread."""
_SHORTEST, _LONGEST = 20e-6, 500e-6
"""Seconds between two queries of an event, increased by half each time."""

TransferPiece = Callable[["PythonOperation", ImagePiece], int]
"""Transfers a piece and returns the digest of its bytes, 0 if none was asked for. Raises TransferError."""

_WORKER = object()


class PythonOperation:
    """One write, read or copy. Thread-safe; `ssdtrain.storage.pool.Operation` documents the methods."""

    def __init__(self, pool: PythonPool, request: Request, pieces: list[ImagePiece]) -> None:
        self.request = request
        self.nbytes, self.checksum = request.nbytes, request.checksum
        self.pieces = pieces
        self.remaining = len(pieces)
        self.digest = 0
        self.began = self.seconds = 0.0
        self.error: IOFailure | SourceChanged | None = None
        self.queried = False
        self._pool = pool
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
        if not self.done():
            if not self._latch.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                return False
            self._latch.release()
        error = self.failed()
        if error is not None:
            raise error
        return True

    def cancel(self) -> bool:
        forks.check(self._generation, "this operation")
        me = object()
        owner = self._owner.setdefault("by", me)
        if owner is me:
            self._pool.cancelled.append(self.nbytes)
            self.finish()
        # Whoever cancelled may destroy the event next.
        while self.queried and threading.get_ident() not in self._pool.event_threads:
            time.sleep(_SHORTEST)
        return owner is not _WORKER

    def failed(self) -> IOFailure | IOCancelled | SourceChanged | None:
        if not self.done():
            return None
        if not self.begun():
            text = f"this operation of {self.nbytes} bytes was cancelled: nothing was transferred"
            return IOCancelled(text)
        # A copy: a raised exception keeps its traceback alive, which the operation must not.
        return copy.copy(self.error)

    def claim(self) -> bool:
        """Whether a worker may run it, because it starts it now or one has started it."""
        return self._owner.setdefault("by", _WORKER) is _WORKER

    def finish(self) -> None:
        self._done = True
        self._latch.release()


class _Activity:
    """Bytes moved in one direction of one queue, and the time with at least one transfer. Guarded by the pool's lock."""

    def __init__(self) -> None:
        self.nbytes = self.active = 0
        self.seconds = self.since = 0.0

    def change(self, transfers: int, nbytes: int = 0) -> None:
        now = time.perf_counter()
        if self.active:
            self.seconds += now - self.since
        self.since = now
        self.active += transfers
        self.nbytes += nbytes


class ThreadSetup:
    """Makes a device the current one of a worker thread, and its calls harmless to a graph capture of another thread.

    Args:
        set_device, exchange_capture_mode, device: see `ssdtrain.storage.pool.make_pool`.
    """

    def __init__(self, set_device: int, exchange_capture_mode: int, device: int) -> None:
        self._set_device = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(set_device) if set_device else None
        relax = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
        self._relax = relax(exchange_capture_mode) if exchange_capture_mode else None
        self._device = device

    def __call__(self) -> int:
        """Return 0 or a CUDA error."""
        code = self._set_device(self._device) if self._set_device is not None else 0
        if not code and self._relax is not None:
            code = self._relax(ctypes.byref(ctypes.c_int(RELAXED_CAPTURE)))
        return int(code)


class PythonPool:
    """Workers of the Python engine. The arguments are those of `ssdtrain.storage.pool.make_pool`, and one:

    Args:
        make_transfer: called by each worker, makes the function that transfers its pieces. None: host memory, by system calls.
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
        make_transfer: Callable[[], TransferPiece] | None = None,
        event_query: int = 0,
        set_device: int = 0,
        exchange_capture_mode: int = 0,
        device: int = -1,
    ) -> None:
        self._piece, self._make_error = piece, make_error
        self._in_host_memory = make_transfer is None
        self._make_transfer = make_transfer or partial(_bounced_transfer, files)
        # Signal-safe, so that a finalizer can detect that its thread holds it: see `holds_signal_safe_lock`.
        self._lock = make_signal_safe_lock()
        limits = [threads] * len(files) + [host_threads]
        self._waiting = [(SimpleQueue[Any](), SimpleQueue[Any]()) for _ in limits]  # [queue][direction]
        self._activity = [(_Activity(), _Activity()) for _ in limits]
        self._unheld = [threading.Event(), threading.Event()]  # by direction; see `hold`
        self._unheld_begun = [threading.Event(), threading.Event()]
        self._release()
        self.cancelled: deque[int] = deque()
        self._cancelled_bytes = self._pieces_ended = 0
        self._closed = False
        self._generation = forks.generation()
        # Of writes and of reads: a read must not wait for the events of writes. Reads of host memory have none.
        self._events = [
            SimpleQueue[Any]() for _ in range(0 if not event_query else 1 if self._in_host_memory else 2)
        ]
        self._query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(event_query)
        self._prepare = ThreadSetup(set_device, exchange_capture_mode, device)
        pollers = [
            threading.Thread(target=self._poll_events, args=(waiting,), name="ssdtrain-event", daemon=True)
            for waiting in self._events
        ]
        workers = [
            threading.Thread(target=self._work, args=(queue, direction), name="ssdtrain-io", daemon=True)
            for queue, limit in enumerate(limits)
            for direction in (WRITE, READ)
            for _ in range(limit)
        ]
        self._threads = pollers + workers
        for thread in self._threads:
            thread.start()
        self.event_threads = {thread.ident for thread in pollers}

    def submit(self, *fields: Any) -> PythonOperation:
        """Queue an operation, given as the fields of a `Request`."""
        forks.check(self._generation, "this I/O pool")
        request = Request(*fields)
        if request.event and not self._events:
            raise ValueError("an operation with an event needs a pool with event_query")
        # Before the event completes the bytes are not there.
        if (
            self._in_host_memory
            and request.nbytes
            and not (request.checksum or request.kind & 1 or request.event)
        ):
            request = request._replace(checksum=memory.sample(request.address, request.nbytes))
        pieces = list(cut(request.extents, request.page_offset, request.nbytes, self._piece))
        with self._lock:
            if self._closed:
                raise StoreClosed("this I/O pool is closed")
            operation = PythonOperation(self, request, pieces)
            if not pieces and operation.claim():
                operation.finish()
            elif request.event:
                self._events[request.kind & 1 and len(self._events) - 1].put(operation)
            else:
                self._queue(operation)
        return operation

    def flush(self) -> None:
        """Nothing is deferred."""

    def hold(self, *, begun: bool = False, writes: bool = True, reads: bool = True) -> None:
        """Prevent operations from starting (tests); with `begun`, let them start, so that they can no longer be cancelled, but
        transfer nothing.
        """
        forks.check(self._generation, "this I/O pool")
        unheld = self._unheld_begun if begun else self._unheld
        for event, held in zip(unheld, (writes, reads), strict=True):
            if held:
                event.clear()

    def release(self) -> None:
        """Undo every `hold`."""
        forks.check(self._generation, "this I/O pool")
        self._release()

    def counters(self) -> tuple[list[tuple[int, int, float, float]], int]:
        """Return (bytes written and read, seconds writing and reading) per queue, host memory last; and bytes cancelled."""
        forks.check(self._generation, "this I/O pool")
        with self._lock:
            while self.cancelled:
                self._cancelled_bytes += self.cancelled.popleft()
            for directions in self._activity:
                for activity in directions:
                    activity.change(0)
            figures = [(w.nbytes, r.nbytes, w.seconds, r.seconds) for w, r in self._activity]
        return figures, self._cancelled_bytes

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
        self._release()
        for waiting in (*self._events, *chain.from_iterable(self._waiting)):
            waiting.put(None)
        if timeout is None:
            for thread in self._threads:
                thread.join()
            return True
        patience = Patience(timeout, lambda: self._pieces_ended)
        return all(patience.wait(partial(_joined, thread)) for thread in self._threads)

    def _release(self) -> None:
        for event in (*self._unheld, *self._unheld_begun):
            event.set()

    def _queue(self, operation: PythonOperation) -> None:
        for piece in operation.pieces:
            self._waiting[piece.queue][operation.request.kind & 1].put((operation, piece))

    def _poll_events(self, waiting: SimpleQueue[Any]) -> None:
        """Queue each operation when its event has completed, or fail it; in order."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        mark_worker()
        prepared = False
        while (operation := waiting.get()) is not None:
            code = 0 if prepared else self._prepare()
            prepared = not code
            if prepared:
                code = self._completion(operation)
            with self._lock:  # behind `close` no worker would take it
                if self._closed:
                    operation.cancel()
                elif not code:
                    self._queue(operation)  # one that was cancelled is passed over by its workers
            if code and operation.claim():
                operation.error = self._error(operation, operation.pieces[0], code, EVENT, whole=True)
                operation.finish()

    def _completion(self, operation: PythonOperation) -> int:
        """Wait for the event of an operation, unless that is cancelled. Return its error code, or 0."""
        pause = _SHORTEST
        while not self._closed:
            operation.queried = True  # before `done()`: see `PythonOperation.cancel`
            code = 0 if operation.done() else int(self._query(operation.request.event))
            operation.queried = False
            if code != EVENT_NOT_READY:
                return code
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        return 0

    def _error(
        self, operation: PythonOperation, piece: ImagePiece, code: int, detail: int, *, whole: bool = False
    ) -> IOFailure | SourceChanged:
        nbytes = operation.nbytes if whole else piece.end - piece.start
        return self._make_error(operation.request.kind, piece.queue, code, detail, piece.offset, nbytes)

    def _work(self, queue: int, direction: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        mark_worker()
        made: list[
            TransferPiece
        ] = []  # with the first piece, whose operation fails where there is no memory for it

        def transfer(operation: PythonOperation, piece: ImagePiece) -> int:
            if not made:
                made.append(self._make_transfer())
            return made[0](operation, piece)

        activity = self._activity[queue][direction]
        waiting = self._waiting[queue][direction]
        while (taken := waiting.get()) is not None:
            operation, piece = taken
            self._unheld[direction].wait()
            if self._closed:
                operation.cancel()
            if operation.claim():
                self._unheld_begun[direction].wait()
                self._run(transfer, operation, piece, activity)
            del taken, operation  # while it waits for the next one
        waiting.put(None)  # for the other workers

    def _run(
        self, transfer: TransferPiece, operation: PythonOperation, piece: ImagePiece, activity: _Activity
    ) -> None:
        """Transfer one piece, unless another one of its operation has failed, and end the operation after its last one."""
        with self._lock:
            skip = operation.error is not None
            operation.began = operation.began or time.perf_counter()
            activity.change(1)
        error, digest = None, 0
        if not skip:
            try:
                digest = transfer(operation, piece)
            except TransferError as failure:
                place = piece._replace(offset=failure.offset)
                error = self._error(operation, place, failure.code, failure.detail)
            except Exception:
                # A bug: report it to whoever waits, and keep the worker running.
                logger.exception("a worker of the I/O pool failed")
                error = self._error(operation, piece, errno.EIO, ERRNO)
        moved = (
            0 if skip or error is not None else piece.end - max(piece.start, operation.request.page_offset)
        )
        with self._lock:
            self._pieces_ended += 1
            activity.change(-1, moved)
            operation.error = operation.error or error
            operation.digest = (operation.digest + digest) % (1 << 64)
            operation.remaining -= 1
            if operation.remaining:
                return
        if operation.request.digest:
            operation.digest = operation.digest or 1
        if operation.request.kind & 1 and operation.error is None:
            self._verify(operation)
        operation.seconds = time.perf_counter() - operation.began
        operation.finish()

    def _verify(self, operation: PythonOperation) -> None:
        """Fail a read whose bytes differ from those written, or else from those submitted for writing."""
        request = operation.request
        if request.digest and operation.digest != request.digest:
            operation.error = self._error(operation, operation.pieces[0], errno.EIO, CORRUPTED, whole=True)
        elif request.checksum and memory.sample(request.address, request.nbytes) != request.checksum:
            operation.error = self._error(
                operation, operation.pieces[0], errno.EIO, SOURCE_CHANGED, whole=True
            )


def _bounced_transfer(files: Sequence[tuple[int, bool]]) -> TransferPiece:
    """Make the function of one worker that transfers between the caller's memory, and files or the host tier."""
    area = mmap.mmap(-1, BOUNCE)
    bounce, at_bounce = memoryview(area), ctypes.addressof(ctypes.c_char.from_buffer(area))

    def transfer(operation: PythonOperation, piece: ImagePiece) -> int:
        request = operation.request
        writing = not request.kind & 1
        digest = mix(piece.start + 1) if request.digest else 0
        if request.kind > READ:  # the offset is an address of the host tier
            mine, nbytes = request.address + piece.start, piece.end - piece.start
            if writing:
                _copy_checked(piece.offset, mine, nbytes, piece)
            else:
                memory.copy(mine, piece.offset, nbytes)
            return memory.digest(piece.offset, nbytes, digest) if digest else 0
        fd, direct = files[piece.queue]
        unit = ALIGNMENT if direct else 1
        origin = request.address - request.page_offset
        for at in range(piece.start, piece.end, BOUNCE):
            # Bytes [first, end) of the image; those beside them in its blocks are zeros in the file.
            first, end = max(at, request.page_offset), min(at + BOUNCE, piece.end)
            if first >= end:
                continue
            lead, stop, whole = first - at, end - at, -(-(end - at) // unit) * unit
            if writing:
                bounce[:lead], bounce[stop:whole] = bytes(lead), bytes(whole - stop)
                _copy_checked(at_bounce + lead, origin + first, end - first, piece)
            _call(fd, bounce[:whole], piece.offset + at - piece.start, writing=writing, direct=direct)
            digest = memory.digest(at_bounce + lead, end - first, digest) if digest else 0
            if not writing:
                memory.copy(origin + first, at_bounce + lead, end - first)
        return digest

    return transfer


def _copy_checked(target: int, source: int, nbytes: int, piece: ImagePiece) -> None:
    code = memory.copy_checked(target, source, nbytes)
    if code:
        raise TransferError(code, ERRNO, piece.offset)


def _call(fd: int, part: memoryview, offset: int, *, writing: bool, direct: bool) -> None:
    """Call preadv or pwritev until every byte is transferred. Raises TransferError."""
    while part:
        try:
            done = os.pwritev(fd, [part], offset) if writing else os.preadv(fd, [part], offset)
        except OSError as error:
            raise TransferError(error.errno or errno.EIO, ERRNO, offset) from error
        if done < len(part) and direct:
            done -= done % _SECTOR  # the rest is transferred again
        if done == 0:
            raise TransferError(errno.EIO, NOTHING_WRITTEN if writing else END_OF_FILE, offset)
        offset, part = offset + done, part[done:]


def _joined(thread: threading.Thread, timeout: float) -> bool:
    """Wait for the end of `thread`. False: it has not ended."""
    thread.join(timeout)
    return not thread.is_alive()


assert (WRITE & 1, READ & 1, COPY_IN & 1) == (0, 1, 0) and ERRNO == 0
