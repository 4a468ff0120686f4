"""An operation of the Python I/O engine.

`cancel` takes no lock, because it may run in a finalizer on a thread that holds the pool's: worker and canceller race for one
`dict.setdefault`, which is atomic.
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
    """One write, read or copy. Thread-safe; see `ssdtrain.storage.pool.Operation` for the meaning of each
    method.
    """

    __slots__ = (
        "_begun", "_behind", "_done", "_error", "_generation", "_latch", "_owner", "_pool", "_remaining",
        "address", "check", "event", "kind", "lead", "nbytes", "pieces", "seconds", "serial",
    )  # fmt: skip

    def __init__(
        self, pool: "PythonPool", kind: int, address: int, nbytes: int, lead: int, event: int, check: int
    ) -> None:
        self.kind, self.address, self.nbytes, self.lead, self.event = kind, address, nbytes, lead, event
        self.check = check
        self.serial = self.pieces = self._remaining = 0
        self.seconds = 0.0
        self._begun = 0.0
        self._behind: list[tuple[int, Piece]] = []  # pieces that wait for the event
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
            self._pool.kick()  # also where it has begun: pieces on another drive may have been queued for later
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
            self._pool.leave_event(self)
        return owner is not _WORKER

    def failed(self) -> IOFailure | IOCancelled | SourceChanged | None:
        if not self.done():
            return None
        if self._owner.get("by") is not _WORKER:
            text = f"this operation of {self.nbytes} bytes was cancelled: nothing was transferred"
            return IOCancelled(text)
        # A copy each time: a raised error holds its traceback, and the operation must not.
        return copy.copy(self._error)

    def _claim(self) -> bool:
        """Worker: whether the operation may run, because a worker began it before or begins it now."""
        return self._owner.setdefault("by", _WORKER) is _WORKER

    def _finish(self) -> None:
        self._done = True
        self._latch.release()
