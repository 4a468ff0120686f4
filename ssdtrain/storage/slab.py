"""The spill file of one rank on one drive: unnamed, grown in steps up to its capacity, ranges reused, never punched."""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from ssdtrain.storage.allocator import RangeAllocator
from ssdtrain.storage.arena import Arena
from ssdtrain.storage.errors import StoreFull
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.memory import ALIGNMENT

logger = logging.getLogger(__name__)

GROWTH = 256 << 20
"""Bytes by which a spill file grows: an fallocate takes tens of microseconds regardless of its size."""

SHARE_OF_FREE_SPACE = 0.9
"""Share of a drive's free space that the ranks of a node use when no capacity is given."""

NOT_PREALLOCATED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
"""Errors of fallocate where the file system does not have it, or a seccomp filter denies it."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def preallocate(fd: int, offset: int, nbytes: int) -> int:
    """fallocate(2); not posix_fallocate, which writes zeros on file systems without support. Returns 0 or an errno."""
    return 0 if _libc.fallocate(fd, 0, offset, nbytes) == 0 else ctypes.get_errno()


def open_nameless(directory: Path) -> int:
    """Open a new unnamed file (mode 0600) in `directory`, which the kernel frees when its last descriptor is closed.

    Raises:
        OSError: FileNotFoundError, NotADirectoryError, PermissionError, ...; names the directory.
    """
    if not directory.exists():
        raise FileNotFoundError(
            errno.ENOENT,
            "the spill directory does not exist: create it on the intended drive",
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
        text = f"cannot create a spill file: {os.strerror(code)}; choose a directory that is writable for this user"
        raise OSError(code, text, str(directory)) from error


def direct_io_error(fd: int) -> str:
    """Switch the file to O_DIRECT and verify it by writing and reading a block.

    Returns:
        "" on success, else the reason; the file is then unchanged.
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
                reason = "a block read back differs from what was written"
        except OSError as error:
            # A full disk is not a failure of O_DIRECT; growing the file reports it.
            if error.errno not in FULL:
                reason = os.strerror(error.errno or errno.EIO)
        finally:
            whole.release()
    if reason:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    os.ftruncate(fd, 0)
    return reason


def default_capacity(directory: Path, local_world_size: int) -> int:
    """Bytes of a slab where none are given: of the drive's free space, the share of one rank."""
    try:
        figures = os.statvfs(directory)
    except OSError:
        return ALIGNMENT  # the slab reports what is wrong with the directory
    free = figures.f_bavail * figures.f_frsize
    return max(ALIGNMENT, int(free * SHARE_OF_FREE_SPACE / local_world_size))


class Slab:
    """The spill file of one rank in one directory. Not thread-safe: the store calls it while holding its lock.

    Args:
        directory: an existing directory on the drive.
        index: of the drive in the store.
        capacity: maximum bytes of the file.
        direct: "auto" (buffered I/O with one warning if O_DIRECT is unsupported), "on" (an error then) or "off".
        faults: injected faults (tests).

    Raises:
        OSError: the directory is missing, not a directory or not writable; or O_DIRECT is unsupported and direct="on".
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
        if self.direct and (reason := direct_io_error(self.fd)):
            if direct == "on":
                self.close()
                text = f"O_DIRECT is not supported here ({reason}); set `direct` to 'auto' or use another directory"
                raise OSError(errno.EINVAL, text, str(directory))
            self.direct = False
            logger.warning(
                "%s does not support O_DIRECT (%s): using buffered I/O, slower and with more CPU time",
                directory,
                reason,
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
    def free_bytes(self) -> int:
        """Unallocated bytes of the capacity, possibly fragmented."""
        return self.capacity - self.allocator.used

    def allocate(self, nbytes: int) -> int | None:
        """Allocate `nbytes` and return their file offset; None if the capacity or the drive is exhausted, or it was retired."""
        if self.retired or self.fd < 0:
            return None
        offset = self.allocator.allocate(nbytes)
        if offset is None and self._grow(self.allocator.rounded(nbytes) - self.allocator.trailing):
            offset = self.allocator.allocate(nbytes)
        return offset

    def release(self, offset: int) -> int:
        return self.allocator.free(offset)

    def poison(self, offset: int, nbytes: int, pattern: memoryview) -> None:
        """Overwrite a freed range with `pattern` (tests)."""
        while nbytes and self.fd >= 0 and not self.retired:
            try:
                written = os.pwrite(self.fd, pattern[:nbytes], offset)
            except OSError as error:
                if error.errno == errno.EROFS or (error.errno in FULL and not self._preallocates):
                    return  # the drive became read-only, or never had room for these bytes: nothing to overwrite
                raise
            offset, nbytes = offset + written, nbytes - written

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _grow(self, need: int) -> bool:
        """Extend the file by at least `need` bytes. A partial allocation on a full drive is returned to it."""
        room = self.capacity - self.allocator.size
        if need > room:
            return False
        for step in (min(room, max(need, GROWTH)), need):
            if self._extend_file(step):
                self.allocator.extend(step)
                return True
        return False

    def _extend_file(self, step: int) -> bool:
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
        if code in NOT_PREALLOCATED:
            self._preallocates = False
            logger.info(
                "%s has no preallocation (fallocate: %s): a full drive is only detected on write",
                self.directory,
                os.strerror(code),
            )
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


def no_room(nbytes: int, slabs: Sequence[Slab], host: Arena | None) -> StoreFull:
    """The error of a reservation of `nbytes` that fits nowhere: what is free in each place."""
    parts = [
        f"{slab.directory}: {slab.free_bytes} free{', retired' if slab.retired else ''}" for slab in slabs
    ]
    if host is not None:
        parts.append(f"host tier: {host.capacity - host.allocated} free")
    return StoreFull(
        os.pathsep.join(str(slab.directory) for slab in slabs),
        nbytes,
        sum(slab.free_bytes for slab in slabs if not slab.retired),
        sum(slab.capacity for slab in slabs),
        "; ".join(parts),
    )
