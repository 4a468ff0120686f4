"""A module in the place of kvikio: its documented interface over host memory, with files that are opened as kvikio opens them.

Nothing moves before `check_bytes_done` is called, so memory that is let go of too early is found out.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ssdtrain.storage import memory

__all__ = ["KvikioStandIn", "install"]


class CompatMode(enum.Enum):
    OFF = 0
    ON = 1
    AUTO = 2


def _open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass
class KvikioStandIn:
    """What the stand-in does, and what was done with it."""

    compat_mode: CompatMode = CompatMode.AUTO
    is_gds_available: bool = True
    version: str = "25.10.00"
    registers: bool = True
    """cuFile can use the files. Else kvikio uses the page cache, unless compatibility mode is OFF."""
    gate: threading.Event = field(default_factory=_open_gate)
    """Each transfer waits until it is set."""
    shortest: int | None = None
    """Bytes that one call transfers at most."""
    delay: float = 0.0
    """Seconds of each transfer."""
    fails: set[str] = field(default_factory=set)
    """"read", "write": these raise, as kvikio does."""
    garbles: bool = False
    """Reads bring other bytes."""
    host_address: Callable[[int], int] = int
    """Where the host finds the bytes of an address."""
    written: int = 0
    read: int = 0
    streams: set[int] = field(default_factory=set)
    open_files: int = 0


class _Future:
    def __init__(
        self, stand_in: KvikioStandIn, fd: int, address: int, size: int, offset: int, kind: str
    ) -> None:
        self._stand_in, self._fd, self._kind = stand_in, fd, kind
        self._address, self._size, self._offset = stand_in.host_address(address), size, offset

    def check_bytes_done(self) -> int:
        stand_in = self._stand_in
        time.sleep(stand_in.delay)
        stand_in.gate.wait()
        if self._kind in stand_in.fails:
            raise RuntimeError(f"cuFile error: {self._kind} failed")
        size = min(self._size, stand_in.shortest or self._size)
        buffer = bytearray(size)
        host = memory.Map(size, huge_pages=False)
        try:
            if self._kind == "write":
                code = memory.copy_checked(host.address, self._address, size)
                if code:
                    raise OSError(code, "bad address")
                buffer[:] = memory.view(host.address, size)
                done = os.pwrite(self._fd, buffer, self._offset)
                stand_in.written += done
            else:
                found = os.pread(self._fd, size, self._offset)
                done = len(found)
                memory.view(host.address, size)[:done] = (
                    bytes(byte ^ 1 for byte in found) if stand_in.garbles else found
                )
                memory.copy(self._address, host.address, done)
                stand_in.read += done
        finally:
            host.close()
        return done


def install(monkeypatch: pytest.MonkeyPatch, directory: Path, **settings: Any) -> KvikioStandIn:
    """Let `import kvikio` find the stand-in.

    Args:
        directory: gets a configuration file of cuFile.
        settings: of `KvikioStandIn`.
    """
    stand_in = KvikioStandIn(**settings)

    class CuFile:
        def __init__(self, file: str, flags: str = "r") -> None:
            assert flags == "r+", "a spill file must not be truncated"
            if not stand_in.registers and stand_in.compat_mode is CompatMode.OFF:
                raise RuntimeError("cuFile error: the file cannot be registered")
            self._fds = [os.open(file, os.O_RDWR | os.O_CLOEXEC | more) for more in (0, os.O_DIRECT)]
            stand_in.open_files += 1

        def close(self) -> None:
            fds, self._fds = self._fds, []
            for fd in fds:
                os.close(fd)
            stand_in.open_files -= bool(fds)

        def _transfer(self, kind: str, buf: Any, raw_stream: int, size: int, offset: int) -> _Future:
            interface = buf.__cuda_array_interface__
            (nbytes,), (address, readonly) = interface["shape"], interface["data"]
            assert interface["typestr"] == "|u1" and not readonly and size <= nbytes
            assert offset % 4096 == 0 or stand_in.shortest, "cuFile wants whole blocks"
            stand_in.streams.add(raw_stream)
            return _Future(stand_in, self._fds[0], address, size, offset, kind)

        def raw_write_async(
            self, buf: Any, raw_stream: int, size: int, file_offset: int = 0, dev_offset: int = 0
        ) -> _Future:
            return self._transfer("write", buf, raw_stream, size, file_offset)

        def raw_read_async(
            self, buf: Any, raw_stream: int, size: int, file_offset: int = 0, dev_offset: int = 0
        ) -> _Future:
            return self._transfer("read", buf, raw_stream, size, file_offset)

    @contextmanager
    def set_default(name: str, value: CompatMode) -> Iterator[None]:
        assert name == "compat_mode"
        before, stand_in.compat_mode = stand_in.compat_mode, value
        try:
            yield
        finally:
            stand_in.compat_mode = before

    kvikio, defaults, driver = (
        ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
    )
    kvikio.CuFile, kvikio.CompatMode = CuFile, CompatMode  # type: ignore[attr-defined]
    kvikio.__version__ = stand_in.version  # type: ignore[attr-defined]
    defaults.get = lambda name: {"compat_mode": stand_in.compat_mode}[name]  # type: ignore[attr-defined]
    defaults.set = set_default  # type: ignore[attr-defined]
    driver.get = lambda name: getattr(stand_in, name)  # type: ignore[attr-defined]
    for module in (kvikio, defaults, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = directory / "cufile.json"
    config.write_text("{}")
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(config))
    return stand_in
