"""Transfers of device memory by kvikio, with a stand-in that has its interface and reads and writes host memory."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.storage import IOFailure, SpillStore, gpudirect, memory
from ssdtrain.storage.memory import ALIGNMENT
from tests.support.kvikio_stand_in import CompatMode, KvikioStandIn, install

_atoi = ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p).value or 0


class Digits:
    """An event whose handle is the address of a number in digits, for `atoi`: 600 is cudaErrorNotReady."""

    def __init__(self) -> None:
        self._digits = ctypes.create_string_buffer(b"600")
        self.handle = ctypes.addressof(self._digits)

    def complete(self, code: bytes = b"000") -> None:
        self._digits.raw = code + b"\0"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KvikioStandIn:
    return install(monkeypatch, tmp_path)


def made(tmp_path: Path, *, drives: int = 1, stripe: int = 8 << 20, **settings: Any) -> SpillStore:
    """A store that transfers device memory too."""
    store = made_without(tmp_path, drives=drives, stripe=stripe)
    gpudirect.attach(store, threads=2, new_stream=iter(range(1, 99)).__next__, **settings)
    return store


def made_without(tmp_path: Path, *, drives: int = 1, stripe: int = 8 << 20) -> SpillStore:
    directories = [tmp_path / f"drive-{index}" for index in range(drives)]
    for directory in directories:
        directory.mkdir()
    store = SpillStore(directories, capacity=1 << 28, stripe=stripe)
    if not all(drive.direct for drive in store.metrics.drives):
        store.close()
        pytest.skip("needs a file system with O_DIRECT")
    return store


def filled(nbytes: int) -> memory.Map:
    """Memory in the place of a device's."""
    found = memory.Map(nbytes, huge_pages=False)
    pattern = bytes(index % 251 for index in range(min(nbytes, 251 * 1024)))
    memory.view(found.address, nbytes)[:] = (pattern * (nbytes // len(pattern) + 1))[:nbytes]
    return found


@pytest.mark.parametrize("shortest", [None, 5000])
@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("nbytes", [1, ALIGNMENT, 3 * ALIGNMENT + 17], ids=str)
def test_what_was_written_comes_back(
    stand_in: KvikioStandIn, tmp_path: Path, nbytes: int, drives: int, shortest: int | None
) -> None:
    stand_in.shortest = shortest
    with made(tmp_path, drives=drives) as store:
        write_and_read(store, stand_in, nbytes)
    assert stand_in.open_files == 0


def test_large_ones_are_divided_between_drives_and_workers(
    stand_in: KvikioStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpudirect, "DEVICE_PIECE", 1 << 20)
    with made(tmp_path, drives=2, stripe=1 << 20) as store:
        write_and_read(store, stand_in, 4 * gpudirect.DEVICE_PIECE + 17)
        assert all(drive.bytes_written for drive in store.metrics.drives)


def write_and_read(store: SpillStore, stand_in: KvikioStandIn, nbytes: int) -> None:
    source, target = filled(nbytes), memory.Map(nbytes, huge_pages=False)
    slot = store.reserve(nbytes)
    assert store.transfer_device(slot, source.address, into=True).wait(30)
    assert store.transfer_device(slot, target.address, into=False).wait(30)
    assert memory.view(source.address, nbytes) == memory.view(target.address, nbytes)
    found = store.metrics
    assert found.ssd_bytes_written == found.ssd_bytes_read == nbytes
    assert stand_in.written == stand_in.read == nbytes
    source.close()
    target.close()


def test_host_memory_goes_its_own_way_and_reads_what_a_device_wrote(
    stand_in: KvikioStandIn, tmp_path: Path
) -> None:
    nbytes = 3 * ALIGNMENT + 5
    with made(tmp_path) as store:
        source, target = filled(nbytes), memory.Map(nbytes, huge_pages=False)
        slot = store.reserve(nbytes)
        assert store.transfer_device(slot, source.address, into=True).wait(30)
        assert store.read(slot, target.address).wait(30)
        assert memory.view(source.address, nbytes) == memory.view(target.address, nbytes)
        assert stand_in.read == 0
        source.close()
        target.close()


def test_each_worker_has_a_stream_of_its_own(stand_in: KvikioStandIn, tmp_path: Path) -> None:
    """Else one transfer would wait for another, and for what another stream computes."""
    stand_in.delay = 0.05
    with made(tmp_path) as store:
        source = filled(ALIGNMENT)
        slots = [store.reserve(ALIGNMENT) for _ in range(4)]
        for operation in [store.transfer_device(slot, source.address, into=True) for slot in slots]:
            assert operation.wait(30)
        source.close()
    assert len(stand_in.streams) > 1 and 0 not in stand_in.streams


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_failure_is_the_operations_error(
    stand_in: KvikioStandIn, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with made(tmp_path) as store:
        source = filled(ALIGNMENT)
        slot = store.reserve(ALIGNMENT)
        if kind == "read":
            store.transfer_device(slot, source.address, into=True).wait(30)
        stand_in.fails.add(kind)
        operation = store.transfer_device(slot, source.address, into=kind == "write")
        with pytest.raises(IOFailure, match=f"{kind} of {ALIGNMENT} bytes"):
            operation.wait(30)
        source.close()
    assert f"cuFile error: {kind} failed" in caplog.text


def test_a_read_does_not_wait_for_the_events_of_writes(stand_in: KvikioStandIn, tmp_path: Path) -> None:
    """Backward waits for it, and a write may wait for all that is computed until its tensor is there."""
    with made(tmp_path, event_query=_atoi) as store:
        source, pending, passed = filled(ALIGNMENT), Digits(), Digits()
        slot, other = store.reserve(ALIGNMENT), store.reserve(ALIGNMENT)
        assert store.transfer_device(slot, source.address, into=True).wait(30)
        write = store.transfer_device(other, source.address, into=True, after_event=pending.handle)
        passed.complete()
        read = store.transfer_device(slot, source.address, into=False, after_event=passed.handle)
        assert read.wait(30) and not write.done()
        pending.complete()
        assert write.wait(30)
        source.close()


def test_without_it_a_store_has_its_own_pool_again(stand_in: KvikioStandIn, tmp_path: Path) -> None:
    with made(tmp_path) as store:
        engine = store.metrics.engine
        gpudirect.detach(store)
        assert engine == f"{store.metrics.engine}, cuFile" and stand_in.open_files == 0


def test_a_forked_child_holds_no_descriptor_of_a_spill_file(stand_in: KvikioStandIn, tmp_path: Path) -> None:
    """It would keep the space of the file for as long as the child lives."""
    with made(tmp_path) as store:
        inode = os.fstat(store._slabs[0].fd).st_ino
        assert len(of_inode(inode)) == 3
        pid = os.fork()
        if not pid:
            os._exit(len(of_inode(inode)))
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert len(of_inode(inode)) == 3


def test_a_closed_pool_closes_nothing_in_a_forked_child(stand_in: KvikioStandIn, tmp_path: Path) -> None:
    """The inodes of its files may be those of others by then."""
    with made(tmp_path) as store:
        pool = store.pool
        gpudirect.detach(store)
        others = os.open(f"/proc/self/fd/{store._slabs[0].fd}", os.O_RDWR)
        pid = os.fork()
        if not pid:
            os._exit(0 if os.path.exists(f"/proc/self/fd/{others}") else 1)
        _, status = os.waitpid(pid, 0)
        os.close(others)
        assert os.waitstatus_to_exitcode(status) == 0
        del pool


def test_a_file_that_cufile_cannot_use_is_an_error(stand_in: KvikioStandIn, tmp_path: Path) -> None:
    """By default kvikio would use the page cache, and win a probe by that."""
    stand_in.registers = False
    with made_without(tmp_path) as store:
        pool = store.pool
        with pytest.raises(OSError, match="cannot be registered"):
            gpudirect.attach(store, threads=2, new_stream=lambda: 1)
        assert store.pool is pool and stand_in.open_files == 0
    assert stand_in.compat_mode is CompatMode.AUTO


def of_inode(inode: int) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.stat(f"/proc/self/fd/{fd}").st_ino == inode:
                found.append(fd)
        except OSError:
            pass  # that of the listing
    return found


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "compatibility mode": ({"compat_mode": CompatMode.ON}, "KVIKIO_COMPAT_MODE=AUTO"),
    "no driver": ({"is_gds_available": False}, "nvidia-fs"),
    "old": ({"version": "25.08.00"}, "25.10"),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_not_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    settings, remedy = REASONS[name]
    install(monkeypatch, tmp_path, **settings)
    assert remedy in gpudirect.unavailable()


def test_without_kvikio_the_reason_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert "ssdtrain[gpudirect]" in gpudirect.unavailable()


@pytest.mark.parametrize("error", ["OSError", "RuntimeError"])
def test_a_library_that_cannot_be_loaded_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str
) -> None:
    (tmp_path / "kvikio.py").write_text(f"raise {error}('libcufile.so.0: cannot open')")
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert "libcufile.so.0: cannot open" in gpudirect.unavailable()


def test_without_a_configuration_of_cufile_it_is_not_used(
    stand_in: KvikioStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """kvikio would wait for the default stream before each transfer."""
    assert gpudirect.unavailable() == ""
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "none.json"))
    assert "none.json" in gpudirect.unavailable()
