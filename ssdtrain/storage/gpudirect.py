"""GPUDirect Storage: transfers between device memory and the spill files by kvikio and cuFile, without host memory in between.

The pool is a `PythonPool` whose workers call kvikio instead of preadv and pwritev: queues, events, cancellation and errors are
its own. Only kvikio's documented interface is used.

Note: [Streams of kvikio]
`CuFile.read`, `write`, `pread`, `pwrite` and their raw versions first wait for the default stream, on which PyTorch computes by
default: a read would begin when all queued computation is over. `raw_read_async` and `raw_write_async` wait for the stream
that they are given alone. So each worker has a stream of its own, which nothing else uses, and calls them when the event of
the operation has passed. kvikio does so only where cuFile has a configuration file; else it waits for the default stream.

Note: [Files of kvikio]
kvikio opens the spill file again through /proc, since it has no name. By default it uses the page cache, and says nothing, where
cuFile cannot use the file; in compatibility mode OFF it fails instead. In a forked child these descriptors are closed, like
the slab's: they would keep its space allocated. The objects of kvikio must then never be destroyed there.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdtrain.storage import forks
from ssdtrain.storage.pieces import (
    DEVICE_READ,
    DEVICE_WRITE,
    END_OF_FILE,
    ERRNO,
    EVENT,
    NOTHING_WRITTEN,
    ImagePiece,
    Request,
    TransferError,
)
from ssdtrain.storage.pool import ErrorMaker, Operation, Pool
from ssdtrain.storage.python_engine import PythonOperation, PythonPool, ThreadSetup

if TYPE_CHECKING:
    from ssdtrain.storage.slab import Slab
    from ssdtrain.storage.store import SpillStore

logger = logging.getLogger(__name__)

DEVICE_PIECE = 32 << 20
"""Bytes that one worker transfers at a time: each call costs the workers the GIL."""

CLOSE_TIMEOUT = 30.0
"""Seconds in which no transfer ends, after which close gives up: they may hang in a driver."""

CUFILE_CONFIG = Path("/etc/cufile.json")

OLDEST_KVIKIO = (25, 10)
"""Version of kvikio: older ones hold the GIL while they transfer."""

INSTALL = (
    "pip install 'ssdtrain[gpudirect]', or 'ssdtrain[gpudirect-cu12]' for CUDA 12 (Python 3.11 or newer)"
)

_HUNG: list[object] = []
"""Pools whose transfers may never end, and the memory that these use. See `abandon`."""

_PARENTS: list[GpuDirectPool] = []
"""Pools of the parent, in a forked child. See Note: [Files of kvikio]."""


def unavailable() -> str:
    """Why GPUDirect Storage cannot be used on this machine, with a remedy; "" if it can, as far as is known without a file."""
    try:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        driver = importlib.import_module("kvikio.cufile_driver")
    except (ImportError, OSError, RuntimeError) as error:  # or a library that it loads
        return f"kvikio cannot be imported ({error}): {INSTALL}"
    try:
        if tuple(int(part) for part in kvikio.__version__.split(".")[:2]) < OLDEST_KVIKIO:
            return f"kvikio {kvikio.__version__} holds the GIL while it transfers, 25.10 does not: {INSTALL}"
        if defaults.get("compat_mode") == kvikio.CompatMode.ON:
            return "kvikio is in its compatibility mode, without cuFile: set KVIKIO_COMPAT_MODE=AUTO"
        if not driver.get("is_gds_available"):
            return "cuFile finds no GPUDirect driver: load nvidia-fs (`gdscheck -p` of CUDA shows what is missing)"
    except (AttributeError, KeyError, OSError, RuntimeError, ValueError) as error:
        return f"kvikio or cuFile does not work here ({error}): see `gdscheck -p` of CUDA"
    config = Path(os.environ.get("CUFILE_ENV_PATH_JSON") or CUFILE_CONFIG)
    if not config.exists():
        return f"cuFile has no configuration file ({config}), which asynchronous transfers need: install it from CUDA"
    return ""


class GpuDirectPool:
    """The pool of a store, and beside it one for device memory. An `ssdtrain.storage.pool.Pool`.

    Args:
        pool: of host memory; closed with this one.
        slabs: the spill files.
        threads: concurrent writes per drive, and as many concurrent reads.
        new_stream: a CUDA stream that nothing else uses, as a raw handle. Called by each worker, once.
        event_query, set_device, exchange_capture_mode, device: see `make_pool`.

    Raises:
        OSError: a spill file has no O_DIRECT, or kvikio cannot open it.
    """

    def __init__(
        self,
        pool: Pool,
        slabs: Sequence[Slab],
        *,
        threads: int,
        new_stream: Callable[[], int],
        event_query: int = 0,
        set_device: int = 0,
        exchange_capture_mode: int = 0,
        device: int = -1,
    ) -> None:
        buffered = [str(slab.directory) for slab in slabs if not slab.direct]
        if buffered:
            raise OSError(errno.EINVAL, "the spill file does not support O_DIRECT", buffered[0])
        self.host_pool = pool
        self._slabs = slabs
        self._inodes = {_inode(slab.fd) for slab in slabs}
        self._files: list[Any] = []
        try:
            kvikio = importlib.import_module("kvikio")
            # See Note: [Files of kvikio].
            with importlib.import_module("kvikio.defaults").set("compat_mode", kvikio.CompatMode.OFF):
                for slab in slabs:
                    self._files.append(kvikio.CuFile(f"/proc/self/fd/{slab.fd}", "r+"))
        except (OSError, RuntimeError) as error:
            for file in self._files:
                file.close()
            raise OSError(errno.EIO, f"kvikio cannot open the spill file: {error}") from error
        prepare = ThreadSetup(set_device, exchange_capture_mode, device)
        self._device_pool = PythonPool(
            [(slab.fd, True) for slab in slabs],
            threads=threads,
            host_threads=0,
            piece=DEVICE_PIECE,
            make_error=ErrorMaker([str(slab.directory) for slab in slabs]),
            event_query=event_query,
            set_device=set_device,
            exchange_capture_mode=exchange_capture_mode,
            device=device,
            make_transfer=lambda: _CuFileTransfer(self._files, prepare, new_stream),
        )
        self.engine = f"{self.host_pool.engine}, cuFile"
        forks.track(self)

    def submit(self, *fields: Any) -> Operation:
        """Queue a `Request`; one of device memory is not deferred and has no checksums."""
        request = Request(*fields)
        if request.kind not in (DEVICE_WRITE, DEVICE_READ):
            return self.host_pool.submit(*request)
        return self._device_pool.submit(*request._replace(kind=request.kind & 1, checksum=0, digest=0))

    def flush(self) -> None:
        self.host_pool.flush()

    def hold(self, *, begun: bool = False, writes: bool = True, reads: bool = True) -> None:
        self.host_pool.hold(begun=begun, writes=writes, reads=reads)
        self._device_pool.hold(begun=begun, writes=writes, reads=reads)

    def release(self) -> None:
        self.host_pool.release()
        self._device_pool.release()

    def counters(self) -> tuple[list[tuple[int, int, float, float]], int]:
        """Return the counters of both pools, added up."""
        queues, cancelled = self.host_pool.counters()
        device_queues, device_cancelled = self._device_pool.counters()
        added = [
            (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
            for a, b in zip(queues, device_queues, strict=True)
        ]
        return added, cancelled + device_cancelled

    def close_device(self) -> None:
        """Close the pool of device memory and the files of kvikio. Idempotent; does nothing in a forked child.

        Raises:
            TimeoutError: a transfer, or the query of an event, has not ended, and nothing has for `CLOSE_TIMEOUT` seconds; the
                pool and its files stay open.
        """
        if self in _HUNG:
            return
        if not self._device_pool.close_within(CLOSE_TIMEOUT):
            _HUNG.append(self)
            directories = ", ".join(str(slab.directory) for slab in self._slabs)
            raise TimeoutError(
                f"a transfer of cuFile to {directories}, or the query of a CUDA event before one, does not end, and none has for "
                f"{CLOSE_TIMEOUT:g} s: its threads stay until the process "
                'ends; see dmesg and cufile.log, and set offload.gpudirect to "off"'
            )
        if self not in _PARENTS:
            files, self._files[:] = list(self._files), []
            for file in files:
                file.close()

    def close(self) -> None:
        """Close both pools. Idempotent; does nothing in a forked child.

        Raises:
            TimeoutError: as `close_device`.
        """
        try:
            self.close_device()
        finally:
            self.host_pool.close()

    def after_fork(self) -> None:
        """Close the files of kvikio in a forked child: see Note: [Files of kvikio]."""
        if not self._files:
            return  # closed: files of others may have these inodes by now
        _PARENTS.append(self)
        of_slabs = {slab.fd for slab in self._slabs}
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                if fd not in of_slabs and _inode(fd) in self._inodes:
                    os.close(fd)
            except OSError as error:
                if error.errno != errno.EBADF:  # that of the listing
                    raise


def attach(store: SpillStore, **settings: Any) -> None:
    """Let `store` transfer device memory too, until `detach` or its close.

    Args:
        settings: of `GpuDirectPool`.

    Raises:
        OSError: as `GpuDirectPool`; the store is as before.
    """
    store.use_pool(GpuDirectPool(store.pool, store._slabs, **settings))


def detach(store: SpillStore) -> None:
    """Undo `attach`."""
    pool = store.pool
    assert isinstance(pool, GpuDirectPool)
    store.use_pool(pool.host_pool)
    pool.close_device()


def abandon(store: SpillStore, memory: Sequence[object]) -> None:
    """Undo `attach` without waiting for what is under way, which may never end.

    Args:
        memory: what the transfers use; it is kept as long as the process lives.
    """
    pool = store.pool
    assert isinstance(pool, GpuDirectPool)
    _HUNG.append((pool, memory))
    store.use_pool(pool.host_pool)


class _DeviceBytes:
    """Bytes of device memory, as kvikio takes them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class _CuFileTransfer:
    """Transfers the pieces of one worker thread, on a stream of its own that is made at the first piece and stays."""

    def __init__(self, files: list[Any], prepare: ThreadSetup, new_stream: Callable[[], int]) -> None:
        self._files = files
        self._prepare = prepare
        self._new_stream = new_stream
        self._stream: int | None = None

    def __call__(self, operation: PythonOperation, piece: ImagePiece) -> int:
        """Transfer one piece.

        Raises:
            TransferError: cuFile failed, or the end of the file.
        """
        if self._stream is None:
            code = self._prepare()
            if code:
                raise TransferError(code, EVENT, piece.offset)
            self._stream = self._new_stream()
        file, request = self._files[piece.queue], operation.request
        transfer = file.raw_read_async if request.kind & 1 else file.raw_write_async
        start = max(piece.start, request.page_offset)
        address = request.address + start - request.page_offset
        offset, left = piece.offset + start - piece.start, piece.end - start
        while left:
            try:
                future = transfer(_DeviceBytes(address, left), self._stream, left, offset)
                done = future.check_bytes_done()
            except (OSError, RuntimeError) as error:
                logger.error("cuFile failed at offset %d of spill file %d: %s", offset, piece.queue, error)
                raise TransferError(getattr(error, "errno", None) or errno.EIO, ERRNO, offset) from error
            if done <= 0:
                raise TransferError(errno.EIO, END_OF_FILE if request.kind & 1 else NOTHING_WRITTEN, offset)
            address, offset, left = address + done, offset + done, left - done
        return 0


def _inode(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
