"""Checksums of all bytes: the same by the processor's instruction and by tables, and no change on a drive or in the host tier
goes past them."""

from __future__ import annotations

import importlib
import os
import random
import struct
from collections.abc import Callable, Iterator

import pytest

from ssdtrain.storage import Arena, CorruptedData, Faults, SpillStore, memory
from ssdtrain.storage.faults import HASH_MASK, mix
from tests.storage.conftest import blank, filled, payload

MiB = 1 << 20
Make = Callable[..., SpillStore]
POLYNOMIAL = 0x82F63B78


@pytest.fixture(params=["instruction", "tables"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How a checksum is computed: by the processor's instruction, and as where it has none."""
    native = importlib.import_module("ssdtrain.storage._iopool")
    if not native.refuse_instruction(request.param == "tables") and request.param == "instruction":
        pytest.skip("this processor has no CRC-32C instruction")
    yield str(request.param)
    native.refuse_instruction(False)


def crc32c(data: bytes, crc: int) -> int:
    """Bit by bit, from the definition in RFC 3720, without the final inversion."""
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
    return crc


def reference(data: bytes, before: int) -> int:
    """The digest of `_iopool_digest.h`: words go to three lanes in turn, what is left to the first one."""
    whole = len(data) // 24 * 24
    lanes = [
        crc32c(b"".join(data[at : at + 8] for at in range(8 * lane, whole, 24)), 0xFFFFFFFF)
        for lane in range(3)
    ]
    lanes[0] = crc32c(data[whole:], lanes[0])
    first = mix(before ^ (lanes[0] | lanes[1] << 32))
    return mix(first ^ lanes[2] ^ (len(data) << 32 & HASH_MASK))


def test_the_bitwise_crc_is_the_published_one() -> None:
    """RFC 3720, B.4: 32 bytes of zeros, and of ones."""
    assert crc32c(bytes(32), 0xFFFFFFFF) ^ 0xFFFFFFFF == struct.unpack("<I", bytes.fromhex("aa36918a"))[0]
    assert crc32c(b"\xff" * 32, 0xFFFFFFFF) ^ 0xFFFFFFFF == struct.unpack("<I", bytes.fromhex("43aba862"))[0]


def test_a_digest_is_crc_32c_in_three_lanes(way: str, arena: Arena) -> None:
    native = importlib.import_module("ssdtrain.storage._iopool")
    lease = arena.acquire(8192)
    lease.view()[:] = random.Random(1).randbytes(8192)
    for start, nbytes in [(n % 9, n) for n in range(60)] + [(0, 4096), (1, 4097), (7, 5000)]:
        data = bytes(lease.view()[start : start + nbytes])
        assert native.digest(lease.address + start, nbytes, 77) == reference(data, 77)


@pytest.mark.parametrize("read_offset", [64, 100, 0])
@pytest.mark.parametrize("host", [0, 64 * MiB], ids=["drive", "host"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_what_comes_back_unchanged_passes_wherever_it_goes(
    make_store: Make, arena: Arena, engine: str, way: str, host: int, read_offset: int, direct: str
) -> None:
    """Pieces of 8 MiB in any order, chunks of 1 MiB of them, and all that begins and ends inside of one."""
    faults = Faults(seed=3, torn=True, short=0.2) if engine == "c" else None
    store = make_store(host_bytes=host, direct=direct, faults=faults)
    for nbytes in (1, 23, 4096, MiB - 64, MiB + 1, 9 * MiB + 5):
        source, target = filled(arena, nbytes, page_offset=64), blank(arena, nbytes, page_offset=read_offset)
        slot = store.reserve(nbytes)
        write = store.write(slot, source.address, verify=True)
        assert write.wait(30) and write.digest
        read = store.read(slot, target.address)
        assert read.wait(30) and read.digest == write.digest
        assert bytes(target.view()) == payload(nbytes)
        for lease in (source, target):
            lease.release()
        store.free(slot)


CHANGES: dict[str, Callable[[bytearray], None]] = {
    "one bit": lambda data: data.__setitem__(777, data[777] ^ 4),
    "the last byte": lambda data: data.__setitem__(-1, data[-1] ^ 128),
    "two sign bits": lambda data: [data.__setitem__(at, data[at] ^ 128) for at in (807, 807 + 64)] and None,
    "all sign bits": lambda data: data.__setitem__(
        slice(3, None, 4), bytes(byte ^ 128 for byte in data[3::4])
    ),
    "two blocks exchanged": lambda data: data.__setitem__(
        slice(4096, 12288), data[8192:12288] + data[4096:8192]
    ),
    "zeros": lambda data: data.__setitem__(slice(4096, 8192), bytes(4096)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("host", [0, 64 * MiB], ids=["drive", "host"])
def test_what_comes_back_changed_is_an_error(
    make_store: Make, arena: Arena, way: str, host: int, change: str
) -> None:
    store = make_store(host_bytes=host)
    nbytes = MiB + 5
    source, target = filled(arena, nbytes), blank(arena, nbytes)
    slot = store.reserve(nbytes)
    assert store.write(slot, source.address, verify=True).wait(30)
    data = bytearray(payload(nbytes))
    CHANGES[change](data)
    assert data != payload(nbytes)
    if host:
        slot.view()[:] = data
    else:
        fd = os.open(f"/proc/self/fd/{store._slabs[0].fd}", os.O_RDWR)  # without O_DIRECT
        os.pwrite(fd, data, slot._extents[1])
        os.fsync(fd)
        os.close(fd)
    with pytest.raises(CorruptedData, match="came back changed") as raised:
        store.read(slot, target.address).wait(30)
    assert raised.value.nbytes == nbytes and raised.value.offset == (slot.address or slot._extents[1])
    place = "the host tier" if host else store.metrics.drives[0].path
    assert place in str(raised.value) and ("drive" in str(raised.value)) != bool(host)


def test_the_python_engine_has_the_digest_of_the_c_engine_or_else_zlibs(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = importlib.import_module("ssdtrain.storage._iopool")
    lease = filled(arena, 5000)
    assert memory.digest(lease.address, 5000, 1) == native.digest(lease.address, 5000, 1)
    monkeypatch.setattr(memory, "_native_digest", lambda: None)
    seen = {memory.digest(lease.address, 5000, before) for before in (1, 2)}
    lease.view()[100] ^= 1
    seen.add(memory.digest(lease.address, 5000, 1))
    assert len(seen) == 3
