"""An operation of the Python I/O engine.

`cancel` takes no lock, because it may run in a finalizer on a thread that holds the pool's lock: worker and canceller race for
an atomic `dict.setdefault`.
"""

import copy
import threading
from typing import TYPE_CHECKING

from ssdtrain.storage import forks
from ssdtrain.storage.errors import IOCancelled, IOFailure, SourceChanged
from ssdtrain.storage.pieces import Piece

if TYPE_CHECKING:
    from ssdtrain.storage.python_engine import PythonPool

_WORKER = object()


class PythonOperation:
    """One write, read or copy. Thread-safe; `ssdtrain.storage.pool.Operation` documents the methods."""

    __slots__ = (
        "_done",
        "_error",
        "_generation",
        "_latch",
        "_owner",
        "_pending_pieces",
        "_pool",
        "_remaining",
        "address",
        "began",
        "checksum",
        "digest",
        "digesting",
        "event",
        "expected",
        "first",
        "kind",
        "nbytes",
        "page_offset",
        "pieces",
        "seconds",
        "serial",
    )  # fmt: skip

    def __init__(
        self,
        pool: "PythonPool",
        kind: int,
        address: int,
        nbytes: int,
        page_offset: int,
        event: int,
        checksum: int,
        digest: int,
    ) -> None:
        self.kind, self.address, self.nbytes, self.page_offset, self.event = (
            kind,
            address,
            nbytes,
            page_offset,
            event,
        )
        self.checksum = checksum
        self.digesting, self.expected, self.digest = bool(digest), digest, 0
        self.serial = self.pieces = self._remaining = 0
        self.first: Piece | None = None  # where its bytes begin
        self.seconds = 0.0
        self.began = 0.0
        self._pending_pieces: list[tuple[int, Piece]] = []  # pieces not queued before the event completes
        self._pool = pool
        self._error: IOFailure | SourceChanged | None = None
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
            self._pool.flush()  # even if it has started: pieces on another drive may be deferred
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
            self._pool._cancelled.append((self.kind, self.nbytes))
            self._finish()
        if self.event:
            self._pool.wait_for_event_query(self)
        return owner is not _WORKER

    def failed(self) -> IOFailure | IOCancelled | SourceChanged | None:
        if not self.done():
            return None
        if self._owner.get("by") is not _WORKER:
            text = f"this operation of {self.nbytes} bytes was cancelled: nothing was transferred"
            return IOCancelled(text)
        # A copy: a raised exception keeps its traceback alive, which the operation must not.
        return copy.copy(self._error)

    def add_digest(self, value: int) -> None:
        """Of one piece; called by the worker that transfers it."""
        with self._pool.digests:
            self.digest = (self.digest + value) % (1 << 64) or 1

    def _claim(self) -> bool:
        """Called by a worker: whether the operation may run, because a worker starts it now or has started it."""
        return self._owner.setdefault("by", _WORKER) is _WORKER

    def _finish(self) -> None:
        self._done = True
        self._latch.release()
