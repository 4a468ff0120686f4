"""A lock for changes that a signal must not end half-way.

Python runs signal handlers between two bytecodes of the main thread, and most of them raise: KeyboardInterrupt, or a scheduler's
notice that turns into SystemExit. Raised in the middle of a change of regions, slots or free ranges, it would leave space that
nobody gives back, or space given to two. Inside of a section signals wait: the handler runs as soon as the section ends.

What waits is every signal that has a handler of Python's when `defer_signals` is called. It waits for microseconds, since no
section waits for I/O. Where the C extension was not built a section is an ordinary lock, and a training that survives such
an exception builds its runtime anew.
"""

import importlib
import signal
import threading
from typing import Any, Protocol, cast

__all__ = ["Section", "defer_signals", "inside_section", "make_section", "mark_worker"]


class Section(Protocol):
    """`threading.Lock`'s interface; not reentrant. The C one says so with a RuntimeError instead of a hang."""

    def acquire(self, blocking: bool = True) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *exception: object) -> Any: ...


def _extension() -> Any:
    try:
        return importlib.import_module("ssdtrain.storage._section")
    except ImportError:
        return None


class _PlainSection:
    """A lock that knows whether this thread is inside; signals go their way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        # Counted before, so that a finalizer in between takes this thread to be inside rather than not.
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


def make_section() -> Section:
    """A new lock."""
    return cast(Section, _native.Section() if _native is not None else _PlainSection())


def inside_section() -> bool:
    """True if this thread is inside of any section, or is a worker: so a finalizer on it can wait for no lock and no transfer."""
    return getattr(_local, "depth", 0) > 0 or (_native is not None and _native.inside())


def mark_worker() -> None:
    """This thread serves transfers: see `inside_section`."""
    _local.depth = 1


def defer_signals() -> None:
    """Have the signals that Python handles now wait for the end of sections. Call it again when handlers may have changed."""
    if _native is None:
        return
    for number in _SIGNALS:
        if callable(signal.getsignal(number)):
            _native.defer(number)
