"""Host memory outside of Python's allocator: anonymous maps on huge pages, on the caller's NUMA node, not inherited by forked
children. Also checked copies from memory that its owner may free.
"""

import ctypes
import errno
import functools
import importlib
import logging
import mmap
import os
import platform
import zlib
from collections.abc import Callable
from pathlib import Path

from ssdtrain.storage.faults import mix

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
HUGE_PAGE = 2 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""The system-wide setting of transparent huge pages."""

PIPED = 64 << 10
"""Bytes per transfer through a pipe."""
WORD, SAMPLES, STRIDE = 8, 16, 256 << 10
"""Parameters of a checksum: bytes per sampled word, minimum number of words, bytes per sampled word in large buffers."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if hasattr(_libc, "process_vm_readv"):
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip
_MAP_FAILED = ctypes.c_void_p(-1).value
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}


def poison_enabled() -> bool:
    """Whether SSDTRAIN_POISON=1 is set: freed memory and slots are overwritten with 0xFF, a NaN in every float format."""
    return os.environ.get("SSDTRAIN_POISON") == "1"


# The whole address space as one buffer: a slice is 4x cheaper than a ctypes array per address.
_SPACE = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


def view(address: int, nbytes: int) -> memoryview:
    """A writable, non-owning memoryview of `nbytes` at `address`; the memory must outlive it."""
    return _SPACE[address : address + nbytes]


def copy(target: int, source: int, nbytes: int) -> None:
    """memcpy, with the GIL released."""
    ctypes.memmove(target, source, nbytes)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Unavailable:
    """Whether process_vm_readv is unavailable: set at the first call that fails, and by tests."""

    direct_reads = not hasattr(_libc, "process_vm_readv")


def copy_checked(target: int, source: int, nbytes: int) -> int:
    """Copy memory that its owner may free or unmap concurrently, with the GIL released.

    Returns:
        0 or an errno: EFAULT if the source is not mapped, where memcpy would receive SIGSEGV.

    The kernel does the copy: process_vm_readv on this process, or a pipe if that call is not permitted (seccomp filters of old
    container runtimes). `_iopool_memory.h` is the C version.
    """
    while nbytes and not _Unavailable.direct_reads:
        to, of = _Vector(target, nbytes), _Vector(source, nbytes)
        done = _libc.process_vm_readv(os.getpid(), ctypes.byref(to), 1, ctypes.byref(of), 1, 0)
        code = ctypes.get_errno() if done < 0 else 0
        if code in (errno.EFAULT, errno.ENOMEM) or done == 0:
            return code or errno.EFAULT
        if code == errno.EINTR:
            continue
        if code:
            _Unavailable.direct_reads = True
            break
        target, source, nbytes = target + done, source + done, nbytes - done
    return _copy_through_pipe(target, source, nbytes) if nbytes else 0


def check_copies() -> None:
    """Check that `copy_checked` and the C engine have a way to read memory.

    Raises:
        PermissionError: the system denies both; has a line for each.
    """
    word, copy = ctypes.create_string_buffer(1), ctypes.create_string_buffer(1)
    vectors = _Vector(ctypes.addressof(copy), 1), _Vector(ctypes.addressof(word), 1)
    reason = "the C library does not have it"
    if not _Unavailable.direct_reads:
        if (
            _libc.process_vm_readv(os.getpid(), ctypes.byref(vectors[0]), 1, ctypes.byref(vectors[1]), 1, 0)
            == 1
        ):
            return
        reason = os.strerror(ctypes.get_errno())
    try:
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PermissionError(
            errno.EPERM,
            "the I/O workers cannot read memory that may be freed while they do: the system refuses both calls for it. Allow one "
            f"of them in the container's seccomp profile\n  process_vm_readv: {reason}\n  pipe2: {os.strerror(error.errno or 0)}",
        ) from error
    for end in ends:
        os.close(end)


def _copy_through_pipe(target: int, source: int, nbytes: int) -> int:
    try:
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return error.errno or errno.EFAULT
    try:
        while nbytes:
            filled = os.write(ends[1], view(source, min(nbytes, PIPED)))
            while filled:
                taken = os.readv(ends[0], [view(target, filled)])
                target, source = target + taken, source + taken
                nbytes, filled = nbytes - taken, filled - taken
    except OSError as error:
        return error.errno or errno.EFAULT
    finally:
        for end in ends:
            os.close(end)
    return 0


@functools.lru_cache(256)
def _sampled(nbytes: int) -> tuple[slice, ...]:
    """The sampled words, the same as in `_iopool_memory.h`."""
    if nbytes < WORD:
        return (slice(0, nbytes),)
    stride = max(WORD, min(STRIDE, nbytes // SAMPLES))
    places = [nbytes - WORD, 0]
    for at in range(0, nbytes - stride + 1, stride):
        places.append(at + mix(at + 1) % (stride - WORD + 1))
    return tuple(slice(place, place + WORD) for place in places)


def sample(address: int, nbytes: int) -> int:
    """A nonzero checksum of sampled words: at pseudo-random places, the last word, and the first, where allocators link free
    memory.

    Samples at least 16 words (all of a smaller buffer), and one word per 256 KiB above 4 MiB. The memory must be readable.
    """
    data = view(address, nbytes)
    words = b"".join([data[word] for word in _sampled(nbytes)])
    return zlib.crc32(words) << 32 | zlib.adler32(words, nbytes & 0xFFFF) or 1


@functools.cache
def _native_digest() -> Callable[[int, int, int], int] | None:
    """Return the digest of the C engine, whose processor instruction is ten times as fast as zlib; None where it was not
    built."""
    try:
        native = importlib.import_module("ssdtrain.storage._iopool")
    except ImportError:
        return None
    function: Callable[[int, int, int], int] = native.digest
    return function


def digest(address: int, nbytes: int, before: int) -> int:
    """A checksum of all bytes of mapped memory, after `before`, that of the bytes before them. The GIL is released.

    `_iopool_digest.h` says which; zlib's CRC-32 takes its place where the C engine was not built. A store compares digests of one
    process only.
    """
    native = _native_digest()
    if native is not None:
        return native(address, nbytes, before)
    return mix(before ^ zlib.crc32(view(address, nbytes)) << 32 ^ nbytes)


def fill(address: int, byte: int, nbytes: int) -> None:
    ctypes.memset(address, byte, nbytes)


def huge_pages_enabled() -> bool:
    """Whether the system has transparent huge pages and they are not set to `never`."""
    try:
        return "[never]" not in HUGE_PAGES.read_text()
    except OSError:
        return False


class Map:
    """`nbytes` of private anonymous memory, aligned to the huge page, not inherited by forked children.

    Args:
        node: NUMA node of the pages; None: that of the calling thread.

    Pages are allocated at first touch. Not freed by the garbage collector: `close` unmaps, and only in the process that mapped,
    because a child may have another map at that address.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True, node: int | None = None) -> None:
        self.nbytes = (
            -(-nbytes // HUGE_PAGE) * HUGE_PAGE if huge_pages else -(-nbytes // ALIGNMENT) * ALIGNMENT
        )
        self._pid = os.getpid()
        slack = HUGE_PAGE if huge_pages else 0
        base = _libc.mmap(
            None,
            self.nbytes + slack,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            -1,
            0,
        )
        if base == _MAP_FAILED:
            code = ctypes.get_errno()
            raise MemoryError(
                f"cannot map {nbytes} bytes of host memory: {os.strerror(code)}; reduce the arena or the host tier, or"
                " raise the limit (ulimit -v)"
            )
        self.address = base + (-base % HUGE_PAGE if huge_pages else 0)
        for start, end in ((base, self.address), (self.address + self.nbytes, base + self.nbytes + slack)):
            if end > start:
                _libc.munmap(start, end - start)
        self._advise(mmap.MADV_DONTFORK, "MADV_DONTFORK", required=True)
        if huge_pages:
            self._advise(mmap.MADV_HUGEPAGE, "MADV_HUGEPAGE", required=False)
        _prefer_node(self.address, self.nbytes, numa_node() if node is None else node)

    def _advise(self, advice: int, name: str, *, required: bool) -> None:
        if _libc.madvise(self.address, self.nbytes, advice) == 0:
            return
        code = ctypes.get_errno()
        if required:
            text = (
                f"madvise({name}) on {self.nbytes} bytes failed: {os.strerror(code)}; without it a forked child would have a "
                "part in transfers: allow the call in the container's seccomp profile"
            )
            self.close()
            raise OSError(code, text)
        logger.info(
            "huge pages are not available (%s: %s): transfers need more CPU time", name, os.strerror(code)
        )

    def abandon(self) -> None:
        """Leave the memory mapped for as long as the process lives: something may still use it."""
        self.nbytes = 0

    def close(self) -> None:
        if self.nbytes and self._pid == os.getpid():
            _libc.munmap(self.address, self.nbytes)
        self.nbytes = 0


def numa_node() -> int | None:
    """The NUMA node this thread runs on, or None where there is only one."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    cpu, node = ctypes.c_uint(), ctypes.c_uint()
    if not hasattr(_libc, "getcpu") or _libc.getcpu(ctypes.byref(cpu), ctypes.byref(node)) != 0:
        return None
    return node.value


def _prefer_node(address: int, nbytes: int, node: int | None) -> None:
    """Prefer pages of a NUMA node, whichever thread touches them first. None: the machine has only one."""
    call = _MBIND.get(platform.machine())
    if node is None or call is None or node >= 64:
        return
    mask = ctypes.c_ulong(1 << node)
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        _MPOL_PREFERRED,
        ctypes.byref(mask),
        ctypes.c_ulong(65),
        0,
    )
    if _libc.syscall(ctypes.c_long(call), *arguments) != 0:
        logger.info("cannot prefer NUMA node %d for the arena: %s", node, os.strerror(ctypes.get_errno()))
