"""Exceptions of storage. Each carries the path and sizes, and its message includes a remedy."""

import errno as codes
import os
from typing import Any

HOST_MEMORY = "host memory"
"""Name in the place of a directory, in errors of the host tier."""

ADVICE = {
    codes.ENOSPC: "free space on that drive, lower `capacity`, or add another directory",
    codes.EDQUOT: "raise the quota of that file system, lower `capacity`, or add another directory",
    codes.EIO: "the drive or its file system failed (see dmesg and `smartctl -a`): use another directory",
    codes.EINVAL: "the file system rejected an aligned O_DIRECT transfer: set `direct` to 'off'",
    codes.EPERM: "the system denies a call of the I/O workers: allow pwritev, preadv and process_vm_readv in the container's "
    "seccomp profile",
    codes.EMFILE: "too many files are open: raise `ulimit -n`",
    codes.EFAULT: "the memory was freed while it was in use: it must stay alive until the operation is done",
}


def advice(errno: int) -> str:
    return ADVICE.get(errno, "check that the directory's file system is healthy and writable")


class IOCancelled(RuntimeError):
    """The operation was cancelled; no byte was transferred."""


class SourceChanged(RuntimeError):
    """The bytes read differ from those submitted for writing. Either the source memory changed before a worker had read it
    (freed and reused, or written to while the write was queued), or the drive returned wrong data. The bytes must not be used.
    """


class StoreClosed(RuntimeError):
    """A closed store, pool or arena was used, or one that was created before a fork was used in the child."""


class HostBudgetExceeded(MemoryError):
    """The ranks of this node need more host memory than is available."""


class IOFailure(OSError):
    """A transfer failed; its target must not be used.

    Attributes:
        errno, strerror: of the system call.
        filename: the spill directory.
        operation: "read" or "write".
        offset: in the spill file, bytes.
        nbytes: of the transfer.
        event_code: CUDA error of the event that the transfer waited for; 0 if the drive failed.
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
                f"{self.operation} of {self.nbytes} bytes to {self.filename} did not start: the CUDA event it waited for"
                f" failed with CUDA error {self.event_code}; an earlier kernel or copy on that stream failed"
            )
        name = codes.errorcode.get(self.errno or 0, str(self.errno))
        return (
            f"{self.operation} of {self.nbytes} bytes at offset {self.offset} of the spill file in {self.filename}"
            f" failed: {self.strerror} [{name}]; {advice(self.errno or 0)}"
        )


class CorruptedData(IOFailure):
    """A read brought other bytes than were written: the checksum of all of them differs.

    Attributes:
        subject: what the bytes are; "" where the store alone knows them.
    """

    subject = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return (*super().__reduce__(), {"subject": self.subject})

    def __str__(self) -> str:
        text = super().__str__()
        if self.filename == HOST_MEMORY:
            text = (
                f"{self.operation} of {self.nbytes} bytes at address {self.offset:#x} of the host tier failed: {self.strerror}; "
                "the memory of this machine is faulty, or other code wrote there (see dmesg): use another machine"
            )
        return f"{text}. It is {self.subject}" if self.subject else text


class StoreFull(OSError):
    """No tier has room for a reservation.

    Attributes:
        requested: bytes.
        free: unused bytes, possibly fragmented.
        capacity: bytes of all drives.
        filename: the spill directories, joined by `os.pathsep`.
    """

    def __init__(self, path: str, requested: int, free: int, capacity: int, detail: str = "") -> None:
        super().__init__(codes.ENOSPC, detail or "the store is full", path)
        self.requested = requested
        self.free = free
        self.capacity = capacity

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.filename, self.requested, self.free, self.capacity, self.strerror)

    def __str__(self) -> str:
        return (
            f"no room for {self.requested} bytes: {self.free} of {self.capacity} bytes are free in"
            f" {self.filename or 'host memory'} ({self.strerror}); raise the capacity, free space, add another"
            " directory, or offload less"
        )
