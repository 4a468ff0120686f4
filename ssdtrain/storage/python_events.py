"""Operations that wait for a CUDA event in the Python engine: a thread polls the events in order. `_iopool_events.h` is the C
version and explains the design.
"""

import ctypes
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ssdtrain.storage.signal_safe_lock import mark_worker

if TYPE_CHECKING:
    from ssdtrain.storage.python_operation import PythonOperation

NOT_READY = 600
"""cudaErrorNotReady."""
RELAXED = 2
"""cudaStreamCaptureModeRelaxed: queries by this thread do not invalidate a capture of another thread."""
SHORTEST, LONGEST = 20e-6, 500e-6
"""Seconds between two queries of an event, increased by half each time."""


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
        """Returns 0 or a CUDA error."""
        code = self._set_device(self._device) if self._set_device is not None else 0
        if not code and self._relax is not None:
            code = self._relax(ctypes.byref(ctypes.c_int(RELAXED)))
        return int(code)


class EventWaiter:
    """Queues each operation when its event has completed.

    Args:
        event_query, set_device, exchange_capture_mode, device: see `ssdtrain.storage.pool.make_pool`.
        completed: called with each operation whose event has completed, and its error code or 0.
    """

    def __init__(
        self,
        event_query: int,
        set_device: int,
        exchange_capture_mode: int,
        device: int,
        completed: "Callable[[PythonOperation, int], None]",
    ) -> None:
        self._query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(event_query)
        self._prepare = ThreadSetup(set_device, exchange_capture_mode, device)
        self._completed = completed
        self._waiting: deque[PythonOperation] = deque()
        self._ready = threading.Condition()
        self._queried: PythonOperation | None = None
        self._closed = False
        self.thread = threading.Thread(target=self._work, name="ssdtrain-event", daemon=True)
        self.thread.start()

    def submit(self, operation: "PythonOperation") -> None:
        with self._ready:
            self._waiting.append(operation)
            self._ready.notify()

    def wait_for_query(self, operation: "PythonOperation") -> None:
        """Block until the event of a cancelled operation is no longer queried, so that it may be destroyed."""
        while self._queried is operation and threading.get_ident() != self.thread.ident:
            time.sleep(SHORTEST)

    def close(self) -> None:
        """Cancel all waiting operations and let `thread` end. Idempotent."""
        with self._ready:
            self._closed = True
            for operation in self._waiting:
                operation.cancel()
            self._ready.notify()

    def _next(self) -> "PythonOperation | None":
        with self._ready:
            while not self._waiting and not self._closed:
                self._ready.wait()
            return self._waiting.popleft() if self._waiting else None

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        mark_worker()
        prepared = False
        while (operation := self._next()) is not None:
            code = 0 if prepared else self._prepare()
            prepared = not code
            polled = self._poll(operation) if prepared else code
            if polled is not None:
                self._completed(operation, polled)

    def _poll(self, operation: "PythonOperation") -> int | None:
        """The event's error code or 0 when it has completed; None if the operation was cancelled."""
        pause = SHORTEST
        while True:
            if self._closed:
                operation.cancel()
            self._queried = operation  # before `operation.done()`: see `wait_for_query`
            code = None if operation.done() else int(self._query(operation.event))
            self._queried = None
            if code != NOT_READY:
                return code
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST)
