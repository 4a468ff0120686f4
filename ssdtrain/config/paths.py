"""Directories in a config: validation, expansion per rank, and checks of the file system."""

import functools
import getpass
import logging
import os
import re
import socket
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssdtrain.config.errors import ConfigError, ConfigIssue, InvalidValue

logger = logging.getLogger(__name__)

PLACEHOLDERS = ("rank", "local_rank", "host", "user")
DIRECTORY_ALLOWED = (
    f"a directory; {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)} and ~ are expanded on each rank, "
    "it need not exist yet, but must not be a file"
)
DIRECTORIES_ALLOWED = f"one directory or a list of them; each is {DIRECTORY_ALLOWED}"
LONGEST_PATH, LONGEST_NAME = 4095, 255
"""Maximum bytes of a path and of a name in it, on Linux."""
KERNEL_FILE_SYSTEMS = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs"}
)
WRITABLE_ALLOWED = "a directory that this user can write to, or a new one below such a directory"
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def parse_directory(value: Any) -> str:
    """Validate a directory and return it as a string, placeholders included.

    Raises:
        InvalidValue: not a string or path, empty, too long, not encodable, surrounding blanks, a URL, an unknown placeholder, an
            unbalanced brace, a "$" (environment variables are not expanded), or a "~" of an unknown user.
    """
    if not isinstance(value, str | os.PathLike):
        raise InvalidValue(f"is a {type(value).__name__}", DIRECTORY_ALLOWED)
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InvalidValue("names no directory", DIRECTORY_ALLOWED)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise InvalidValue("holds characters that UTF-8 cannot encode", DIRECTORY_ALLOWED) from None
    if len(encoded) > LONGEST_PATH or max(map(len, encoded.split(b"/"))) > LONGEST_NAME:
        limit = f"more than {LONGEST_PATH} bytes, or than {LONGEST_NAME} in one name"
        raise InvalidValue(f"is too long ({limit})", DIRECTORY_ALLOWED)
    if text != text.strip():
        raise InvalidValue("begins or ends with a blank", DIRECTORY_ALLOWED)
    if "://" in text:
        raise InvalidValue("is a URL, and only what the system has mounted can be used", DIRECTORY_ALLOWED)
    if "$" in text:
        raise InvalidValue("holds a $, and environment variables are not expanded here", DIRECTORY_ALLOWED)
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError as error:
        raise InvalidValue(f"has unbalanced braces ({error})", DIRECTORY_ALLOWED) from None
    for _, name, spec, conversion in fields:
        if name is not None and (name not in PLACEHOLDERS or spec or conversion):
            raise InvalidValue(f'has the unknown placeholder "{{{name}}}"', DIRECTORY_ALLOWED)
    if text[0] == "~" and _expanded(text, 0, 0)[0] == "~":
        raise InvalidValue(
            "begins with a ~ that leads to no home directory on this machine", DIRECTORY_ALLOWED
        )
    return text


def parse_directories(value: Any) -> tuple[str, ...]:
    """One directory or a sequence of them, as a tuple.

    Raises:
        InvalidValue: one of them is invalid, or there are duplicates.
    """
    if isinstance(value, str | os.PathLike):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise InvalidValue(f"is a {type(value).__name__}", DIRECTORIES_ALLOWED)
    texts = tuple(map(parse_directory, value))
    for twice in repeated([Path(os.path.abspath(os.path.expanduser(text))) for text in texts]):
        raise InvalidValue(f'holds "{twice}" twice', "each directory once; one slab is made in each")
    return texts


def repeated(paths: list[Path]) -> Iterator[Path]:
    """The duplicates in `paths`."""
    seen: set[Path] = set()
    for path in paths:
        if path in seen:
            yield path
        seen.add(path)


def expand_path(text: str, *, rank: int, local_rank: int) -> Path:
    """The absolute path of `text` on one rank of this machine.

    Args:
        rank: global rank, for {rank}.
        local_rank: rank within the node, for {local_rank}.
    """
    return Path(os.path.abspath(_expanded(text, rank, local_rank)))


def _expanded(text: str, rank: int, local_rank: int) -> str:
    names = {"rank": rank, "local_rank": local_rank, "host": socket.gethostname(), "user": _user()}
    return os.path.expanduser(text.format(**names))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without an entry for the user id; KeyError before Python 3.13
        return str(os.getuid())


def has_placeholder(text: str) -> bool:
    """Whether `text` contains placeholders."""
    return any(name is not None for _, name, _, _ in string.Formatter().parse(text))


def problem_with_directory(path: Path) -> str | None:
    """Why `path` cannot be used as a directory, or None. It may be missing if a parent is a directory."""
    try:
        for place in (path, *path.parents):
            if place.is_dir():
                return None
            if os.path.lexists(place):
                if place.is_dir():  # created by another rank in the meantime
                    return None
                kind = "a broken link" if not place.exists() else "a file"
                return f"is {kind}" if place == path else f'lies below "{place}", which is {kind}'
    except OSError as error:
        return f"cannot be accessed ({error.strerror})"
    return None


def nearest_existing(path: Path) -> Path:
    """`path` or its nearest existing parent.

    Raises:
        OSError: a parent cannot be searched.
    """
    return next(place for place in (path, *path.parents) if place == place.parent or place.exists())


def problem_with_writing(path: Path) -> str | None:
    """Why this process cannot create files in `path`, or create `path` itself, or None. Creates nothing."""
    try:
        place = nearest_existing(path)
        writable = os.access(place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
    except OSError as error:
        return f"cannot be accessed ({error.strerror})"
    kind = file_system_of(place)
    if kind in KERNEL_FILE_SYSTEMS:
        return f"is on {kind}, where only the kernel makes files"
    if writable:
        return None
    who = f"for user {_user()} (read-only, or no permission)"
    if place == path:
        return f"is not writable {who}"
    return f'does not exist, and cannot be made, because "{place}" is not writable {who}'


def check_directories(paths: tuple[Path, ...], key: str) -> None:
    """Check directories, and warn about those in memory.

    Args:
        key: full key of the directories, to which the index is appended.

    Raises:
        ConfigError: a file is in the way, or two are the same directory (after links are followed).
    """
    problems = []
    for index, path in enumerate(paths):
        why = problem_with_directory(path)
        if why is not None:
            problems.append(ConfigIssue(f"{key}[{index}]", str(path), why, DIRECTORY_ALLOWED))
    for twice in repeated([Path(os.path.realpath(path)) for path in paths]):
        why = "is named twice (after placeholders and links)"
        problems.append(ConfigIssue(key, str(twice), why, "each directory once; one slab is made in each"))
    if problems:
        raise ConfigError(problems)
    for index, path in enumerate(paths):
        kind = file_system_of(path)
        if kind in MEMORY_FILE_SYSTEMS:
            _warn_of_memory(f"{key}[{index}]", path, kind)


@functools.cache
def _warn_of_memory(key: str, path: Path, kind: str) -> None:
    """Once for a directory: a start expands the same directories several times."""
    logger.warning(
        "%s: %s is on %s, which is memory, not a drive: offloading there does not free RAM. "
        "Use a directory on an SSD, or `host` to offload to RAM (docs/storage.md)",
        key,
        path,
        kind,
    )


def file_system_of(path: Path, mounts: str = "/proc/self/mounts") -> str | None:
    """The type ("ext4", "tmpfs", ...) of the file system that holds `path`; None if unknown."""
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux, or no /proc
        return None
    real = Path(os.path.realpath(path))
    best, kind = -1, None
    for line in lines:
        _, where, name, *_ = line.split(" ")
        # The kernel writes blanks, tabs, newlines and backslashes as octal escapes.
        point = Path(re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), where))
        # Later lines cover earlier ones that are mounted on the same point, hence >=.
        if real.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), name
    return kind
