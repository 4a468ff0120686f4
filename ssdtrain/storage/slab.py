"""One rank's spill file on one drive: nameless from birth, grown in steps up to its capacity, ranges reused,
never punched.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from pathlib import Path

from ssdtrain.storage.allocator import RangeAllocator
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.memory import ALIGNMENT

logger = logging.getLogger(__name__)

GROWTH = 256 << 20
"""Bytes by which a spill file grows at once: an fallocate costs tens of microseconds, whatever its size."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def preallocate(fd: int, offset: int, nbytes: int) -> int:
    """fallocate(2), and not posix_fallocate, which writes zeros where the file system cannot. 0 or an errno."""
    return 0 if _libc.fallocate(fd, 0, offset, nbytes) == 0 else ctypes.get_errno()


def open_nameless(directory: Path) -> int:
    """A descriptor of a new private file (0600) in `directory` that has no name, so that it ends with its
    last process.

    Raises:
        OSError: of the class that fits (FileNotFoundError, NotADirectoryError, PermissionError), naming the
        directory.
    """
    if not directory.exists():
        raise FileNotFoundError(
            errno.ENOENT,
            "the spill directory does not exist: create it on the drive you mean",
            str(directory),
        )
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "the spill directory is not a directory", str(directory))
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
        name = directory / f".ssdtrain-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(name)
        return fd
    except OSError as error:
        code = error.errno or errno.EIO
        text = f"cannot create a spill file: {os.strerror(code)}; choose a directory that this user may write"
        raise OSError(code, text, str(directory)) from error


def refuses_direct(fd: int) -> str:
    """Why the file cannot be used with O_DIRECT, or "" after it was switched to it and a block came back as
    it was written.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        return os.strerror(error.errno or errno.EINVAL)
    with mmap.mmap(-1, 2 * ALIGNMENT) as block:
        pattern = bytes(range(256)) * (ALIGNMENT // 256)
        block[:ALIGNMENT] = pattern
        whole = memoryview(block)
        reason = ""
        try:
            os.pwrite(fd, whole[:ALIGNMENT], 0)
            os.preadv(fd, [whole[ALIGNMENT:]], 0)
            if whole[ALIGNMENT:] != pattern:
                reason = "a block came back altered"
        except OSError as error:
            # A full disk says nothing about O_DIRECT; growing the file will report it.
            if error.errno not in FULL:
                reason = os.strerror(error.errno or errno.EIO)
        finally:
            whole.release()
    if reason:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    os.ftruncate(fd, 0)
    return reason


class Slab:
    """The spill file of one rank in one directory. Not thread-safe: the store holds its lock around every
    call.

    Args:
        directory: on the drive to use; must exist.
        index: number of the drive in the store.
        capacity: bytes that the file may take.
        direct: "auto" (buffered with one warning where O_DIRECT is refused), "on" (raises there) or "off".

    Raises:
        OSError: the directory is missing, not a directory or not writable, or O_DIRECT is refused under
        direct="on".
    """

    def __init__(
        self,
        directory: Path,
        index: int,
        capacity: int,
        *,
        direct: str = "auto",
        faults: Faults | None = None,
    ) -> None:
        self.directory = directory
        self.index = index
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.retired = False
        self.fd = open_nameless(directory)
        self.direct = direct != "off"
        if self.direct and (reason := refuses_direct(self.fd)):
            if direct == "on":
                self.close()
                text = (
                    f"O_DIRECT is refused here ({reason}); set `direct` to 'auto' or take another directory"
                )
                raise OSError(errno.EINVAL, text, str(directory))
            self.direct = False
            logger.warning(
                "%s refuses O_DIRECT (%s): buffered I/O there, slower and at much more CPU", directory, reason
            )
        self.allocator = RangeAllocator(0, ALIGNMENT)
        self._preallocates = True
        self._faults = (
            faults
            if faults and faults.full_after is not None and faults.full_drive in (None, index)
            else None
        )

    @property
    def used(self) -> int:
        return self.allocator.used

    @property
    def free(self) -> int:
        """Bytes that could still be taken if the drive gives what the capacity says, perhaps in pieces."""
        return self.capacity - self.allocator.used

    def take(self, nbytes: int) -> int | None:
        """The file offset of `nbytes` of space; None when the capacity or drive is exhausted or it was retired."""
        if self.retired or self.fd < 0:
            return None
        offset = self.allocator.take(nbytes)
        if offset is None and self._grow(self.allocator.rounded(nbytes) - self.allocator.trailing):
            offset = self.allocator.take(nbytes)
        return offset

    def give(self, offset: int) -> int:
        return self.allocator.give(offset)

    def poison(self, offset: int, nbytes: int, pattern: memoryview) -> None:
        """Overwrite a freed range by `pattern` (tests)."""
        while nbytes and self.fd >= 0 and not self.retired:
            try:
                written = os.pwrite(self.fd, pattern[:nbytes], offset)
            except OSError as error:
                if error.errno == errno.EROFS or (error.errno in FULL and not self._preallocates):
                    return  # it takes no bytes any more, or had no room for these: there is nothing to overwrite
                raise
            offset, nbytes = offset + written, nbytes - written

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _grow(self, need: int) -> bool:
        """Make the file at least `need` bytes longer. A drive that is full gives nothing: a partial
        allocation is returned.
        """
        room = self.capacity - self.allocator.size
        if need > room:
            return False
        for step in (min(room, max(need, GROWTH)), need):
            if self._allocate(step):
                self.allocator.extend(step)
                return True
        return False

    def _allocate(self, step: int) -> bool:
        size = self.allocator.size
        code = 0
        asked = step
        if (
            self._faults is not None
            and self._faults.full_after is not None
            and size + step > self._faults.full_after
        ):
            asked, code = max(0, self._faults.full_after - size) // ALIGNMENT * ALIGNMENT, errno.ENOSPC
        if self._preallocates and asked:
            code = preallocate(self.fd, size, asked) or code
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            self._preallocates = False
            logger.info("%s cannot preallocate: a full drive will show when it is written", self.directory)
            code = 0
        if not self._preallocates:
            os.ftruncate(self.fd, size + step)
        if code in FULL:
            os.ftruncate(self.fd, size)
            return False
        if code:
            os.ftruncate(self.fd, size)
            raise OSError(
                code,
                f"cannot reserve {step} bytes for the spill file: {os.strerror(code)}",
                str(self.directory),
            )
        return True
