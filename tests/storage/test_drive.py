"""The drive behind a directory, its wear, and the life it has left."""

import os
from pathlib import Path

import pytest

from ssdtrain.storage import Drive, Endurance, drive_of, projected_life, rated_bytes
from ssdtrain.storage.drive import SmartLog, parse_smart, read_smart


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path, Path]:
    """(directory, proc, sys) of a machine whose directory lies on the first partition of nvme0n1."""
    directory = tmp_path / "data" / "spill here"
    directory.mkdir(parents=True)
    number = os.stat(directory).st_dev
    number_text = f"{os.major(number)}:{os.minor(number)}"
    proc, sysfs = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    escaped = str(directory).replace(" ", "\\040")
    (proc / "self/mountinfo").write_text(
        f"1 0 0:99 / / rw - overlay overlay rw\n"
        f"2 1 {number_text} / {tmp_path} rw shared:1 - ext4 /dev/other rw\n"
        f"3 1 {number_text} / {escaped} rw,noatime shared:2 - xfs /dev/nvme0n1p1 rw\n"
    )
    disk = sysfs / "devices/pci0/nvme0n1"
    for path, text in {
        "device/model": "ACME 7 ",
        "size": "2000",
        "queue/rotational": "0",
        "nvme0n1p1/partition": "1",
    }.items():
        (disk / path).parent.mkdir(parents=True, exist_ok=True)
        (disk / path).write_text(text + "\n")
    (sysfs / "dev/block").mkdir(parents=True)
    (sysfs / "dev/block" / number_text).symlink_to(disk / "nvme0n1p1")
    (sysfs / "block").mkdir()
    (sysfs / "block/nvme0n1").symlink_to(disk)
    (disk / "stat").write_text("1 2 3 4 5 6 4096 8 9 10 11\n")
    return directory, proc, sysfs


def test_a_directory_leads_to_its_mount_and_its_whole_disk(kernel: tuple[Path, Path, Path]) -> None:
    directory, proc, sysfs = kernel
    drive = drive_of(directory, proc=proc, sysfs=sysfs)
    assert drive == Drive(str(directory), str(directory), "xfs", "nvme0n1", "ACME 7", 2000 * 512, False)
    assert drive.written_bytes(sysfs) == 4096 * 512
    assert drive.free_bytes() > 0


def test_a_directory_without_a_disk_still_has_a_size(tmp_path: Path, kernel: tuple[Path, Path, Path]) -> None:
    directory, proc, _ = kernel
    drive = drive_of(directory, proc=proc, sysfs=tmp_path / "empty")
    assert drive.device == "" and drive.size > 0 and drive.written_bytes(tmp_path / "empty") is None
    assert drive.smart() is None


def test_this_machine_answers(tmp_path: Path) -> None:
    drive = drive_of(tmp_path)
    assert drive.mount and drive.filesystem and drive.size >= drive.free_bytes() > 0
    assert drive.written_bytes() is None or drive.device


def test_a_smart_log_is_read_at_its_places() -> None:
    log = bytearray(512)
    log[5] = 103
    log[48:64] = (1234567890123).to_bytes(16, "little")
    smart = parse_smart(bytes(log))
    assert (smart.percentage_used, smart.data_bytes_written) == (103, 1234567890123 * 512_000)


def test_a_device_that_is_no_nvme_drive_has_no_smart_log() -> None:
    assert read_smart(Path("/dev/null")) is None and read_smart(Path("/dev/absent")) is None


def test_life_is_rated_bytes_over_bytes_per_second() -> None:
    tb = 10**12
    assert rated_bytes(int(7.68 * tb)) == pytest.approx(14.016e15)
    # 1 GB/s wears a 7.68 TB drive of one write a day out in 162 days, a 6.4 TB drive of three in 405.
    assert projected_life(rated_bytes(int(7.68 * tb)), 1e9, 1.0) / 86400 == pytest.approx(162, abs=0.5)
    assert projected_life(rated_bytes(int(6.4 * tb), writes_per_day=3), 2e9, 2.0) / 86400 == pytest.approx(
        405, abs=1
    )
    assert projected_life(1.0, 0, 1.0) == float("inf")
    with pytest.raises(ValueError, match="must be positive"):
        projected_life(1.0, 1.0, 0.0)


def worn(monkeypatch: pytest.MonkeyPatch, smart: SmartLog | None, device: str = "nvme0n1") -> None:
    drive = Drive("", "/", "ext4", device, "model", 10**12, False)
    monkeypatch.setattr("ssdtrain.storage.endurance.drive_of", lambda _: drive)
    monkeypatch.setattr(Drive, "smart", lambda _: smart)


def test_a_run_wears_the_drives_of_its_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rated, one, two = rated_bytes(10**12), tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    written = {str(one): 10**9, str(two): 10**9, "host memory": 10**12}
    worn(monkeypatch, None)
    # Two directories on one drive, where nothing of another place counts.
    assert Endurance([one, two]).life(written, 10.0) == pytest.approx(rated / 2e9 * 10)
    # Another rank of the node writes there too, to a directory that is not yet made.
    shared = Endurance([one, two], [[tmp_path / "three" / "four"], [Path("/proc/self")]])
    assert shared.life(written, 10.0) == pytest.approx(rated / 4e9 * 10)
    worn(monkeypatch, SmartLog(75, 10**15))
    assert Endurance([one]).life(written, 10.0) == pytest.approx(rated / 4 / 1e9 * 10)


def test_a_life_is_unknown_without_a_disk_a_write_or_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worn(monkeypatch, None)
    endurance = Endurance([tmp_path])
    assert endurance.life({str(tmp_path): 0}, 1.0) is None
    assert endurance.life({str(tmp_path): 1}, 0.0) is None
    worn(monkeypatch, None, device="")
    assert Endurance([tmp_path]).life({str(tmp_path): 1}, 1.0) is None
