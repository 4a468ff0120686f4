"""Memory that its owner frees, unmaps or uses for something else while a write of it waits: an error, never a signal."""

from __future__ import annotations

import ctypes
import errno
import importlib
import random
from collections.abc import Callable, Iterator

import pytest

from ssdtrain.storage import Arena, IOFailure, SourceChanged, SpillStore, memory
from tests.storage.conftest import blank, contents, filled, payload

MiB = 1 << 20
PAGE = 4096
Make = Callable[..., SpillStore]


@pytest.fixture(params=["direct", "piped"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How memory is read: by process_vm_readv, and as where that is refused."""
    native = importlib.import_module("ssdtrain.storage._iopool")
    refused = request.param == "piped"
    memory._Unavailable.direct_reads = refused
    native.refuse_direct_reads(refused)
    yield request.param
    memory._Unavailable.direct_reads = False
    native.refuse_direct_reads(False)


class Source:
    """Private memory that can be unmapped under a write, all of it or from some page on."""

    def __init__(self, nbytes: int) -> None:
        self.map = memory.Map(nbytes, huge_pages=False)
        self.address = self.map.address
        ctypes.memmove(self.address, random.Random(1).randbytes(nbytes), nbytes)

    def unmap(self, first: int = 0) -> None:
        memory._libc.munmap(self.address + first, self.map.nbytes - first)
        self.map.nbytes = first


@pytest.mark.parametrize("host", [0, 64 * MiB], ids=["drive", "host"])
@pytest.mark.parametrize("gone", ["all", "the end"])
@pytest.mark.parametrize(
    ("page_offset", "nbytes"), [(64, 3 * MiB), (4095, 2), (0, 9 * MiB + 5), (100, 20 * MiB)]
)
def test_memory_that_is_gone_fails_the_write(
    make_store: Make, way: str, host: int, gone: str, page_offset: int, nbytes: int
) -> None:
    store = make_store(host_bytes=host)
    source = Source(page_offset + nbytes + PAGE)
    slot = store.reserve(nbytes)
    store.pool.hold()
    write = store.write(slot, source.address + page_offset)
    source.unmap(0 if gone == "all" else (page_offset + nbytes - 1) // PAGE * PAGE)
    store.pool.release()
    with pytest.raises(IOFailure) as raised:
        write.wait(30)
    assert raised.value.errno == errno.EFAULT
    with pytest.raises(ValueError, match="its write failed"):
        store.read(slot, source.address)
    store.free(slot)
    source.map.close()


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("host", [0, 64 * MiB], ids=["drive", "host"])
def test_what_is_there_is_stored_as_it_is(
    make_store: Make, arena: Arena, way: str, host: int, direct: str
) -> None:
    store = make_store(host_bytes=host, direct=direct)
    for nbytes, page_offset in ((1, 0), (4097, 64), (70_000, 4095), (9 * MiB + 3, 65)):
        source = filled(arena, nbytes, page_offset=page_offset)
        slot = store.reserve(nbytes)
        assert store.write(slot, source.address).wait(30)
        assert contents(store, slot, arena) == payload(nbytes)
        store.free(slot)
        source.release()


def test_putting_memory_that_is_gone_into_huge_pages_does_nothing(make_store: Make) -> None:
    store = make_store(huge_pages=True)
    source = Source(12 * MiB)
    slot = store.reserve(10 * MiB)
    store.pool.hold()
    write = store.write(slot, source.address)
    source.unmap()
    store.pool.release()
    with pytest.raises(IOFailure, match="EFAULT"):
        write.wait(30)


@pytest.mark.parametrize("host", [0, 64 * MiB], ids=["drive", "host"])
@pytest.mark.parametrize("nbytes", [8, 100, 5000, 3 * MiB, 20 * MiB])
def test_bytes_that_changed_before_the_write_read_them_are_known_when_they_are_read(
    make_store: Make, arena: Arena, host: int, nbytes: int
) -> None:
    store = make_store(host_bytes=host)
    source, target = filled(arena, nbytes, page_offset=64, seed=1), blank(arena, nbytes)
    slot = store.reserve(nbytes)
    store.pool.hold()
    write = store.write(slot, source.address)
    kept = bytes(source.view())
    source.view()[:] = payload(nbytes, 2)
    store.pool.release()
    assert write.wait(30)
    source.view()[:] = kept  # and its owner put them back: nothing of the memory shows what happened
    read = store.read(slot, target.address)
    with pytest.raises(SourceChanged, match="freed, reused or modified"):
        read.wait(30)
    assert read.done() and isinstance(read.failed(), SourceChanged)
    # The same bytes written again, as after a failure, are held to the first sample too.
    assert store.write(slot, source.address, checksum=write.checksum).wait(30)
    assert store.read(slot, target.address).wait(30) and bytes(target.view()) == payload(nbytes, 1)


def test_a_change_of_a_part_is_seen_where_a_sample_lies(make_store: Make, arena: Arena) -> None:
    """One word of each sixteenth: whatever changes twice as much at a stretch is found."""
    store = make_store()
    source = filled(arena, MiB)
    check = store.write(store.reserve(MiB), source.address).checksum
    for at in range(0, MiB - 128 * 1024 + 1, 32 * 1024):
        changed = bytearray(payload(MiB))
        changed[at : at + 128 * 1024] = bytes(255 - byte for byte in changed[at : at + 128 * 1024])
        source.view()[:] = changed
        other = store.write(again := store.reserve(MiB), source.address)
        assert other.checksum != check
        assert other.wait(30)
        store.free(again)


def test_the_slot_of_a_cancelled_first_write_holds_nothing(make_store: Make, arena: Arena) -> None:
    store = make_store()
    source, slot = filled(arena, MiB), store.reserve(MiB)
    store.pool.hold()
    write = store.write(slot, source.address)
    with pytest.raises(ValueError, match="not ended"):
        store.read(slot, source.address)
    assert write.cancel()
    store.pool.release()
    with pytest.raises(ValueError, match="never written"):
        store.read(slot, source.address)
