"""Which I/O engine runs, and what both have in common: the operation's interface and the making of its
errors.
"""

import errno
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from ssdtrain.storage.errors import IOCancelled, IOFailure, SourceChanged
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.pieces import WRITE
from ssdtrain.storage.python_engine import PythonPool
from ssdtrain.storage.python_transfer import CHANGED, END_OF_FILE, EVENT, NOTHING_WRITTEN

logger = logging.getLogger(__name__)

PIECE = 8 << 20
"""Bytes of the pieces that a large operation is cut into, so that several workers serve it."""


class Operation(Protocol):
    """A transfer that was queued. Thread-safe; may be dropped while in flight.

    `nbytes` is its size; `seconds`, once it is done, the time from the first piece's beginning to the last
    one's end. `check` is a sample of the bytes that a write was given (`memory.sample`), 0 where it was behind an event.
    """

    nbytes: int
    seconds: float
    check: int

    def done(self) -> bool:
        """Whether it finished: succeeded, failed or was cancelled."""
        ...

    def begun(self) -> bool:
        """Whether a worker took it, so that it can no longer be cancelled."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, without the GIL, at most `timeout` seconds. True when it succeeded, False when time ran out.

        Raises:
            IOFailure: it failed; none of its bytes may be used.
            IOCancelled: it was cancelled.
            SourceChanged: a read; what was stored is not what the write was given.
            StoreClosed: it belongs to the parent of this process.
        """
        ...

    def cancel(self) -> bool:
        """True: none of its bytes was or will be transferred, the memory is free again. False: too late."""
        ...

    def failed(self) -> IOFailure | IOCancelled | SourceChanged | None:
        """What `wait` would raise: None means that it has succeeded, or is not done. Never waits.

        A cancelled operation has failed too: `done()` and no error is the only way to know that bytes were transferred.
        """
        ...


class Pool(Protocol):
    """Worker threads for some files and for host memory. See `PythonPool` for what each method does."""

    engine: str

    def submit(
        self,
        kind: int,
        address: int,
        nbytes: int,
        lead: int,
        extents: Sequence[int],
        event: int = 0,
        later: bool = False,
        check: int = 0,
    ) -> Operation: ...
    def kick(self) -> None: ...
    def hold(self, *, begun: bool = False, writes: bool = True, reads: bool = True) -> None: ...
    def release(self) -> None: ...
    def counters(self) -> tuple[list[tuple[int, int, float, float]], int]: ...
    def close(self) -> None: ...


class ErrorMaker:
    """Turns what a worker saw into an error. Called as (kind, queue, code, detail, offset, nbytes)."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = list(directories)

    def __call__(
        self, kind: int, queue: int, code: int, detail: int, offset: int, nbytes: int
    ) -> IOFailure | SourceChanged:
        operation = "read" if kind & 1 else "write"
        directory = self._directories[queue] if queue < len(self._directories) else "host memory"
        if detail == EVENT:
            return IOFailure(errno.EIO, "a CUDA event failed", directory, operation, offset, nbytes, code)
        if detail == CHANGED:
            return SourceChanged(
                f"the bytes read back from {directory} at offset {offset} are not those that were to be stored: their memory"
                " was freed, used again or written to before the write had read it (or the drive is faulty: see dmesg)"
            )
        text = {END_OF_FILE: "the file ended early", NOTHING_WRITTEN: "the system wrote 0 bytes"}.get(
            detail, os.strerror(code)
        )
        return IOFailure(code, text, directory, operation, offset, nbytes)


def load_extension() -> Any:
    """The C engine's module. Raises ImportError where the package was installed without a compiler."""
    return importlib.import_module("ssdtrain.storage._iopool")


class _Told:
    fallback = False


def make_pool(
    files: Sequence[tuple[int, bool]],
    directories: Sequence[str],
    *,
    engine: str = "auto",
    threads: int = 4,
    host_threads: int = 0,
    piece: int = PIECE,
    faults: Faults | None = None,
    event_query: int = 0,
    set_device: int = 0,
    exchange_capture_mode: int = 0,
    device: int = -1,
    huge_pages: bool = False,
) -> Pool:
    """Start the workers.

    Args:
        files: (descriptor, whether it is open with O_DIRECT) of each drive.
        directories: their directories, for error texts.
        engine: "c", "python", or "auto": C where it was built, else Python with one log line.
        threads: workers per drive for writes, and as many for reads: one thread more, so that a read never waits for a write.
        host_threads: workers that copy to and from the host tier; 0 without one.
        piece: bytes, a multiple of 4096.
        event_query: address of `int f(void *event)`: 0 when the event has passed, 600 when it has not, else an error code, as
            cudaEventQuery. One thread calls it, again and again until the event of the oldest operation has passed.
        set_device: address of `int f(int device)`, called once by that thread before the first event: cudaSetDevice.
        exchange_capture_mode: address of `int f(int *mode)`, called once by that thread, so that its queries disturb no capture
            of a CUDA graph: cudaThreadExchangeStreamCaptureMode.
        huge_pages: put the memory that is written from into huge pages, as far as that is worth it: see
            `_iopool_pages.h`. The C engine does; what the Python engine costs lies elsewhere.

    Raises:
        ValueError: an unknown engine, or a size that does not fit.
        ImportError: engine="c" and the extension was not built.
    """
    if engine not in ("auto", "c", "python"):
        raise ValueError(f"engine is 'auto', 'c' or 'python', got {engine!r}")
    if threads < 1 or piece < 4096 or piece % 4096:
        raise ValueError(
            f"an I/O pool needs at least 1 thread and pieces of n x 4096 bytes, got {threads} and {piece}"
        )
    make_error = ErrorMaker(directories)
    settings: dict[str, Any] = {
        "threads": threads,
        "host_threads": host_threads,
        "piece": piece,
        "make_error": make_error,
    }
    settings |= {"event_query": event_query, "set_device": set_device, "device": device}
    settings["exchange_capture_mode"] = exchange_capture_mode
    if engine != "python":
        try:
            return load_extension().Pool(
                list(files), faults=as_tuple(faults), huge_pages=huge_pages, **settings
            )
        except ImportError as error:
            if engine == "c":
                raise ImportError(
                    "the C I/O engine was not built: install a C compiler and reinstall, or set the engine to 'auto'"
                ) from error
            if not _Told.fallback:
                _Told.fallback = True
                logger.warning(
                    "the C I/O engine was not built (%s): the Python engine runs, slower while Python is busy",
                    error,
                )
    return PythonPool(files, faults=faults, **settings)


def as_tuple(faults: Faults | None) -> tuple[Any, ...] | None:
    """Faults in the order in which the C engine parses them."""
    if faults is None:
        return None
    return (
        faults.seed & ((1 << 64) - 1),
        faults.delay,
        faults.max_delay,
        faults.short,
        faults.interrupt,
        faults.write_failure,
        faults.read_failure,
        faults.error,
        int(faults.torn),
        tuple(sorted(faults.fail_writes)),
        tuple(sorted(faults.fail_reads)),
    )


assert WRITE == 0
