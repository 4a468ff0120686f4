"""Selects the I/O engine, and defines what both engines share: the interfaces of pools and operations, and their errors."""

import errno
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from ssdtrain.storage.drive import drive_of
from ssdtrain.storage.errors import HOST_MEMORY, CorruptedData, IOCancelled, IOFailure, SourceChanged
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.pieces import CORRUPTED, END_OF_FILE, EVENT, NOTHING_WRITTEN, SOURCE_CHANGED, WRITE
from ssdtrain.storage.python_engine import PythonPool

logger = logging.getLogger(__name__)

WRONG_CHECKSUM = (
    "the data came back changed: its checksum differs from that of what was to be written (or a program wrote to the tensor "
    "while it was stored)"
)

PIECE = 8 << 20
"""Bytes per piece: a large operation is divided so that several workers serve it."""


class Operation(Protocol):
    """A queued transfer. Thread-safe; may be dropped while in flight.

    Attributes:
        nbytes: size.
        began: start of the first piece on the clock of `time.perf_counter`, once done; 0 if none was started.
        seconds: from the start of the first piece to the end of the last one, once done.
        checksum: of the bytes submitted for writing (`memory.sample`); 0 if the write waits for an event.
        digest: checksum of all bytes, once done; 0 where none was asked for.
    """

    nbytes: int
    began: float
    seconds: float
    checksum: int

    @property
    def digest(self) -> int: ...

    def done(self) -> bool:
        """Whether it succeeded, failed or was cancelled."""
        ...

    def begun(self) -> bool:
        """Whether a worker has started it, so that it can no longer be cancelled."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds with the GIL released.

        Returns:
            True if it succeeded, False on timeout.

        Raises:
            IOFailure: it failed; its target must not be used.
            IOCancelled: it was cancelled.
            SourceChanged: a read returned bytes that differ from those submitted for writing.
            StoreClosed: it belongs to the parent process.
        """
        ...

    def cancel(self) -> bool:
        """Cancel it if it has not started.

        Returns:
            True if no byte was or will be transferred, so that the memory may be reused; False if it has started.
        """
        ...

    def failed(self) -> IOFailure | IOCancelled | SourceChanged | None:
        """The exception that `wait` would raise; None if it succeeded or is not done. Never blocks.

        Cancellation counts as failure: the bytes were transferred only if `done()` is true and `failed()` is None.
        """
        ...


class Pool(Protocol):
    """Worker threads for files and host memory. `PythonPool` documents the methods."""

    engine: str

    def submit(self, *request: Any) -> Operation:
        """Queue a transfer. The arguments are the fields of a `ssdtrain.storage.pieces.Request`.

        Raises:
            ValueError: an event without `event_query`, or an extent of a queue that the pool does not have.
            StoreClosed: the pool is closed or belongs to the parent process.
        """
        ...

    def flush(self) -> None: ...
    def hold(self, *, begun: bool = False, writes: bool = True, reads: bool = True) -> None: ...
    def release(self) -> None: ...
    def counters(self) -> tuple[list[tuple[int, int, float, float]], int]: ...
    def close(self) -> None: ...


def drive_text(directory: str) -> str:
    """The disk behind a directory, in words."""
    try:
        drive = drive_of(directory)
    except OSError:  # the directory was removed, or there is no /proc
        return "drive unknown"
    return (
        f"drive {drive.device} {drive.model}".strip() if drive.device else f"file system {drive.filesystem}"
    )


class ErrorMaker:
    """Creates the exception for a worker's failure. Called with (kind, queue, code, detail, offset, nbytes)."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = list(directories)

    def __call__(
        self, kind: int, queue: int, code: int, detail: int, offset: int, nbytes: int
    ) -> IOFailure | SourceChanged:
        operation = "read" if kind & 1 else "write"
        directory = self._directories[queue] if queue < len(self._directories) else HOST_MEMORY
        if detail == EVENT:
            return IOFailure(errno.EIO, "a CUDA event failed", directory, operation, offset, nbytes, code)
        if detail == SOURCE_CHANGED:
            return SourceChanged(
                f"the {nbytes} bytes read from {directory} at offset {offset} differ from those submitted for writing: their"
                " memory was freed, reused or modified before the write had read it, or the drive is faulty (see dmesg)"
            )
        if detail == CORRUPTED:
            text = (
                WRONG_CHECKSUM if directory == HOST_MEMORY else f"{WRONG_CHECKSUM} ({drive_text(directory)})"
            )
            return CorruptedData(code, text, directory, operation, offset, nbytes)
        text = {END_OF_FILE: "the file ended early", NOTHING_WRITTEN: "the system wrote 0 bytes"}.get(
            detail, os.strerror(code)
        )
        return IOFailure(code, text, directory, operation, offset, nbytes)


def load_extension() -> Any:
    """Import the C engine. Raises ImportError if the package was installed without a C compiler."""
    return importlib.import_module("ssdtrain.storage._iopool")


class _Warned:
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
    """Create a pool and start its workers.

    Args:
        files: (file descriptor, whether it is open with O_DIRECT) per drive.
        directories: directory per drive, for error messages.
        engine: "c", "python", or "auto": C if it was built, else Python with one warning.
        threads: concurrent writes per drive, and as many concurrent reads. One additional thread per drive ensures that a
            read never waits for a write to end.
        host_threads: workers that copy to and from the host tier; 0 without a host tier.
        piece: bytes per piece, a multiple of 4096.
        faults: injected faults (tests; C engine only).
        event_query: address of `int f(void *event)` with the contract of cudaEventQuery: 0 if the event has completed, 600 if
            not, else an error code. A single thread calls it repeatedly for the oldest event.
        set_device: address of `int f(int device)` (cudaSetDevice), called once by that thread before its first query.
        exchange_capture_mode: address of `int f(int *mode)` (cudaThreadExchangeStreamCaptureMode), called once by that thread
            so that its queries do not invalidate a CUDA graph capture.
        device: CUDA device index for `set_device`.
        huge_pages: whether the workers collapse source memory into huge pages (C engine only; see `_iopool_pages.h`).

    Raises:
        ValueError: an unknown engine, an invalid size, or faults for the Python engine.
        ImportError: engine="c" and the extension was not built.
    """
    if engine not in ("auto", "c", "python"):
        raise ValueError(f"engine must be 'auto', 'c' or 'python', got {engine!r}")
    if threads < 1 or piece < 4096 or piece % 4096:
        raise ValueError(
            f"threads must be at least 1 and piece a multiple of 4096 bytes, got threads={threads}, piece={piece}"
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
            if not _Warned.fallback:
                _Warned.fallback = True
                logger.warning(
                    "the C I/O engine was not built (%s): using the Python engine, which is slower while Python is busy",
                    error,
                )
    if faults is not None and faults.transfers:
        raise ValueError(f"the Python I/O engine injects no faults, got {faults}: set the engine to 'c'")
    return PythonPool(files, **settings)


def as_tuple(faults: Faults | None) -> tuple[Any, ...] | None:
    """The fields of `faults` in the order that the C engine parses."""
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
