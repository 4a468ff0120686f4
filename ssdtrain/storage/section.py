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

__all__ = ["Section", "defer_signals", "make_section"]


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


_native = _extension()
_SIGNALS = sorted(signal.valid_signals())


def make_section() -> Section:
    """A new lock."""
    return cast(Section, _native.Section() if _native is not None else threading.Lock())


def defer_signals() -> None:
    """Have the signals that Python handles now wait for the end of sections. Call it again when handlers may have changed."""
    if _native is None:
        return
    for number in _SIGNALS:
        if callable(signal.getsignal(number)):
            _native.defer(number)
