"""What storage raises. Each error carries the path and the figures, and its text says what to do."""

import errno as codes
import os
from typing import Any

ADVICE = {
    codes.ENOSPC: "free space there, lower `capacity`, or add another directory",
    codes.EDQUOT: "raise the quota of that file system, lower `capacity`, or add another directory",
    codes.EIO: "the drive or its file system failed (see dmesg and `smartctl -a`): take another directory",
    codes.EINVAL: "the file system refused an aligned O_DIRECT transfer: set `direct` to 'off'",
    codes.EFAULT: "the memory was freed while it was in use: it must stay alive until the operation is done",
}


def advice(errno: int) -> str:
    return ADVICE.get(errno, "check that the directory's file system is healthy and writable")


class IOCancelled(RuntimeError):
    """Raised by `Operation.wait` when the operation was cancelled: none of its bytes were transferred."""


class SourceChanged(RuntimeError):
    """A read brought other bytes than its write was given: they changed in memory before a worker had read them (freed and used
    again, or written to while the write waited), or the drive returned what was never written. None of them may be used.
    """


class StoreClosed(RuntimeError):
    """A closed store, pool or arena was used, or one that belongs to the parent of a forked process."""


class HostBudgetExceeded(MemoryError):
    """The ranks of this node ask for more host memory than the node gives."""


class IOFailure(OSError):
    """A transfer failed. None of the bytes it should have delivered may be used.

    Attributes: `errno`, `strerror`, `filename` (the spill directory), `operation` ("read" or "write"), `offset`
    (bytes, in the spill file), `nbytes` (of the transfer), `event_code` (not 0: the drive is fine, but the CUDA event
    in front of the transfer failed with this CUDA error).
    """

    def __init__(
        self,
        errno: int,
        strerror: str = "",
        filename: str | None = None,
        operation: str = "transfer",
        offset: int = 0,
        nbytes: int = 0,
        event_code: int = 0,
    ) -> None:
        super().__init__(errno, strerror or os.strerror(errno), filename)
        self.operation = operation
        self.offset = offset
        self.nbytes = nbytes
        self.event_code = event_code

    def __reduce__(self) -> tuple[Any, ...]:
        where = (self.operation, self.offset, self.nbytes, self.event_code)
        return type(self), (self.errno, self.strerror, self.filename, *where)

    def __str__(self) -> str:
        if self.event_code:
            return (
                f"{self.operation} of {self.nbytes} bytes to {self.filename} was not begun: the CUDA event in front of it"
                f" failed with CUDA error {self.event_code}; an earlier kernel or copy on that stream failed"
            )
        name = codes.errorcode.get(self.errno or 0, str(self.errno))
        return (
            f"{self.operation} of {self.nbytes} bytes at offset {self.offset} of the spill file in {self.filename}"
            f" failed: {self.strerror} [{name}]; {advice(self.errno or 0)}"
        )


class StoreFull(OSError):
    """No tier has room for a reservation.

    Attributes, in bytes: `wanted`, `free` (unused, perhaps in pieces too small), `capacity`. `filename` joins
    the paths.
    """

    def __init__(self, path: str, wanted: int, free: int, capacity: int, detail: str = "") -> None:
        super().__init__(codes.ENOSPC, detail or "the store is full", path)
        self.wanted = wanted
        self.free = free
        self.capacity = capacity

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.filename, self.wanted, self.free, self.capacity, self.strerror)

    def __str__(self) -> str:
        return (
            f"no room for {self.wanted} bytes: {self.free} of {self.capacity} bytes are free in"
            f" {self.filename or 'host memory'} ({self.strerror}); raise the capacity, free space, add another"
            " directory, or offload less"
        )
