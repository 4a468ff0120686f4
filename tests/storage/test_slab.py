"""The spill file: private and nameless, direct where it can be, errors at start that name the path."""

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path

import pytest

from ssdtrain.storage import Arena, SpillStore
from ssdtrain.storage import slab as slab_module
from ssdtrain.storage.slab import Slab
from tests.storage.conftest import contents, filled, payload
from tests.support.filesystems import Mounts

MiB = 1 << 20


def test_the_file_is_private_and_has_no_name(tmp_path: Path) -> None:
    slab = Slab(tmp_path, 0, 4 * MiB)
    status = os.fstat(slab.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 0
    assert fcntl.fcntl(slab.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert os.listdir(tmp_path) == [] and status.st_size == 0
    slab.close()
    slab.close()


def test_where_there_is_no_tmpfile_a_name_lives_for_an_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, names = os.open, []

    def refusing(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        names.append((path, flags))
        return real(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    slab = Slab(tmp_path, 0, 4 * MiB)
    status = os.fstat(slab.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 0 and os.listdir(tmp_path) == []
    assert len(names) == 1 and names[0][1] & os.O_EXCL and names[0][1] & os.O_CLOEXEC
    slab.close()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="create it") as raised:
        SpillStore([tmp_path, tmp_path / "absent"])
    assert raised.value.filename == str(tmp_path / "absent")


def test_a_file_instead_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError) as raised:
        SpillStore([tmp_path / "file"])
    assert raised.value.filename == str(tmp_path / "file")


def test_a_read_only_file_system_is_named(mounts: Mounts) -> None:
    mount = mounts.small(MiB, ",ro")
    with pytest.raises(OSError, match="is writable for") as raised:
        SpillStore([mount])
    assert raised.value.filename == str(mount) and raised.value.errno == errno.EROFS


def test_a_directory_of_another_user_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            with pytest.raises(PermissionError) as raised:
                SpillStore([tmp_path])
        finally:
            os.seteuid(0)
    else:
        tmp_path.chmod(0o555)
        with pytest.raises(PermissionError) as raised:
            SpillStore([tmp_path])
    assert str(tmp_path) in str(raised.value)


@pytest.fixture
def refusing_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(slab_module.fcntl, "fcntl", refuse)


@pytest.mark.usefixtures("refusing_direct")
def test_refused_direct_io_is_one_warning_and_works_buffered(
    tmp_path: Path, engine: str, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), SpillStore([tmp_path], engine=engine, capacity=8 * MiB) as store:
        assert [str(tmp_path) in record.getMessage() for record in caplog.records] == [True]
        source = filled(arena, MiB, page_offset=64)
        slot = store.reserve(MiB)
        assert store.write(slot, source.address).wait(30)
        assert contents(store, slot, arena) == payload(MiB)
        assert not store.metrics.drives[0].direct


@pytest.mark.usefixtures("refusing_direct")
def test_refused_direct_io_is_an_error_when_it_was_demanded(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="O_DIRECT is not supported") as raised:
        SpillStore([tmp_path], direct="on")
    assert raised.value.filename == str(tmp_path)


def test_a_file_system_that_alters_a_direct_block_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 4096)
    slab = Slab(tmp_path, 0, MiB)
    assert not slab.direct
    slab.close()


def test_the_file_grows_in_steps_up_to_its_capacity_and_reuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "GROWTH", MiB)
    slab = Slab(tmp_path, 0, 3 * MiB)
    sizes, offsets = [], []
    for _ in range(6):
        offset = slab.allocate(MiB // 2)
        assert offset is not None
        offsets.append(offset)
        sizes.append(os.fstat(slab.fd).st_size)
    assert sizes == [MiB, MiB, 2 * MiB, 2 * MiB, 3 * MiB, 3 * MiB] and slab.allocate(4096) is None
    for offset in offsets:
        slab.release(offset)
    assert slab.allocate(3 * MiB) == 0 and os.fstat(slab.fd).st_size == 3 * MiB, (
        "neighbours joined, nothing was punched"
    )
    assert os.fstat(slab.fd).st_blocks * 512 >= 3 * MiB, "the space is allocated before it is written"
    slab.close()


def test_a_full_drive_gives_its_partial_allocation_back(mounts: Mounts) -> None:
    mount = mounts.small(2 * MiB)
    slab = Slab(mount, 0, 1 << 30)
    assert slab.allocate(16 * MiB) is None
    assert os.fstat(slab.fd).st_size == 0
    assert slab.allocate(MiB) == 0, "what is there can still be had"
    slab.close()
