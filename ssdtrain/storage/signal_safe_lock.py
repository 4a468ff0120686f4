"""A lock that defers Python signal handlers while it is held.

Python runs signal handlers between two bytecodes of the main thread, and most of them raise: KeyboardInterrupt, or SystemExit
after a scheduler's notice. Raised in the middle of an update of regions, slots or free ranges, such an exception would leak
space or hand it out twice. While a `SignalSafeLock` is held, signals are noted, and their handlers run when it is released.

`signals_deferred` is the same for what one thread changes alone: the submission of a transfer and the change that keeps its
memory are one step.

This applies to every signal that has a Python handler when `defer_signals` is called. The delay is microseconds, because
no code waits for I/O while it holds such a lock. Without the C extension it is an ordinary lock; a training loop that catches
such an exception must then create a new runtime.
"""

import importlib
import signal
import threading
from typing import Any, cast


def _extension() -> Any:
    try:
        return importlib.import_module("ssdtrain.storage._signal_safe_lock")
    except ImportError:
        return None


class SignalSafeLock:
    """Interface of `threading.Lock`; not reentrant. This is the fallback, which tracks whether this thread holds it and does not
    defer signals. The C version raises RuntimeError on reentry instead of deadlocking."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        # Incremented first: a finalizer that runs in between must assume that the lock is held.
        _local.depth = getattr(_local, "depth", 0) + 1
        if self._lock.acquire(blocking):
            return True
        _local.depth -= 1
        return False

    def release(self) -> None:
        self._lock.release()
        _local.depth -= 1

    def __enter__(self) -> Any:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


_local = threading.local()
_native = _extension()
_SIGNALS = sorted(signal.valid_signals())
_handler = getattr(signal, "_signal", signal).getsignal  # without making an enum of what is no function


def make_signal_safe_lock() -> SignalSafeLock:
    """Create a lock: the C version if it was built."""
    return cast(SignalSafeLock, _native.SignalSafeLock() if _native is not None else SignalSafeLock())


def signals_deferred() -> SignalSafeLock:
    """Create the lock of one section, which defers signals and excludes no thread. Sections may be nested."""
    return make_signal_safe_lock()


def holds_signal_safe_lock() -> bool:
    """Whether this thread holds any such lock or is a worker, so that a finalizer on it must not wait for a lock or transfer."""
    return getattr(_local, "depth", 0) > 0 or (_native is not None and _native.inside())


def mark_worker() -> None:
    """Mark this thread as an I/O worker: see `holds_signal_safe_lock`."""
    _local.depth = 1


def defer_signals() -> None:
    """Defer the signals that currently have a Python handler. Call it again when handlers may have changed."""
    if _native is None:
        return
    for number in _SIGNALS:
        if callable(_handler(number)):
            _native.defer(number)
