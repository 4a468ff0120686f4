"""Files that a run leaves behind: journals, traces, pictures, pages. They may be in a directory that others can write to.

Such a directory may hold anything under a name that can be guessed: a link to another file of this user, a FIFO that blocks
who opens it, a file that somebody else reads. Nothing is written through a link, into what is no regular file, or into another
user's file.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_FILE_OF_OURS = (
    "is a link, no regular file, or another user's, so nothing is written to it; remove it, or choose a directory that only "
    "this user can write to"
)


def open_to_append(file: Path) -> TextIO:
    """Open `file` for lines in UTF-8 behind those that it has. A new one can be read by this user alone.

    A file of the directory's owner is taken too: a network file system may give all files of root to another user.

    Raises:
        OSError: it cannot be made, or is a symbolic link, a file of more than one name, no regular file, or another user's.
    """
    flags = _FLAGS | os.O_APPEND
    try:
        descriptor = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        try:
            descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a FIFO does not block
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise _refusal(file) from error
            raise
        status = os.fstat(descriptor)
        owners = (os.geteuid(), os.stat(file.parent).st_uid)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid not in owners:
            os.close(descriptor)
            raise _refusal(file) from None
    return os.fdopen(descriptor, "a", encoding="utf-8")


@contextmanager
def replace_file(file: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Write a new file whole, which takes the place of `file` where the block ends without an exception.

    Args:
        mode: permissions of the new file, less the umask. A file of this user that it replaces hands on its own.

    Raises:
        OSError: it cannot be written, or `file` exists and is no regular file.
    """
    kept = None
    with suppress(FileNotFoundError):
        status = os.lstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(file)
        if status.st_uid == os.geteuid():
            kept = stat.S_IMODE(status.st_mode)
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(partial, _FLAGS | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            if kept is not None:
                os.fchmod(stream.fileno(), kept)
            yield stream
        os.replace(partial, file)
    except BaseException:
        with suppress(OSError):  # it was not made, or the directory is gone
            os.unlink(partial)
        raise


def _refusal(file: Path) -> OSError:
    return OSError(errno.EEXIST, _NO_FILE_OF_OURS, str(file))
