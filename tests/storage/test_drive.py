"""The drive behind a directory, its wear, and the life it has left."""

import os
from pathlib import Path

import pytest

from ssdtrain.storage import Drive, Endurance, Rating, drive_of, projected_life, rated_bytes
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
    return directory, proc, sysfs


def test_a_directory_leads_to_its_mount_and_its_whole_disk(kernel: tuple[Path, Path, Path]) -> None:
    directory, proc, sysfs = kernel
    drive = drive_of(directory, proc=proc, sysfs=sysfs)
    disk = Drive(str(directory), str(directory), "xfs", "nvme0n1", "ACME 7", 2000 * 512, False, ("nvme0n1",))
    assert drive == disk
    assert drive.free_bytes() > 0


def test_an_overlay_leads_to_the_disk_of_its_upper_directory(
    kernel: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    directory, proc, sysfs = kernel
    number = os.stat(tmp_path).st_dev
    text = f"{os.major(number)}:{os.minor(number)}"
    (tmp_path / "merged").mkdir()
    # The upper directory has a disk, the overlay's own device number has none.
    upper = str(directory).replace(" ", "\\040")
    line = (
        f"9 1 {text} / {tmp_path}/merged rw - overlay overlay rw,lowerdir=/a:/b,upperdir={upper},workdir=/w\n"
    )
    mounts = proc / "self/mountinfo"
    mounts.write_text(mounts.read_text() + line)
    block = sysfs / "dev/block" / text
    moved = block.rename(block.with_name("gone"))
    overlay = drive_of(tmp_path / "merged", proc=proc, sysfs=sysfs)
    assert overlay.filesystem == "xfs" and overlay.device == ""  # found the upper one, without its disk
    moved.rename(block)
    assert drive_of(tmp_path / "merged", proc=proc, sysfs=sysfs).device == "nvme0n1"


def stacked(sysfs: Path, number_text: str, name: str, below: list[Path]) -> Path:
    """Have the device number lead to `name`, which lies on `below`."""
    device = sysfs / "devices/virtual/block" / name
    (device / "slaves").mkdir(parents=True)
    (device / "size").write_text("2000\n")
    for disk in below:
        (device / "slaves" / disk.name).symlink_to(disk)
    link = sysfs / "dev/block" / number_text
    link.unlink()
    link.symlink_to(device)
    return device


def test_dm_and_md_lead_to_the_disks_that_they_lie_on(
    kernel: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, proc, sysfs = kernel
    number = os.stat(directory).st_dev
    text = f"{os.major(number)}:{os.minor(number)}"
    first = sysfs / "devices/pci0/nvme0n1"
    stacked(sysfs, text, "dm-0", [first / "nvme0n1p1"])
    encrypted = drive_of(directory, proc=proc, sysfs=sysfs)
    assert (encrypted.device, encrypted.size, encrypted.disks) == ("nvme0n1", 2000 * 512, ("nvme0n1",))
    second = sysfs / "devices/pci0/nvme1n1"
    second.mkdir()
    stacked(sysfs, text, "md0", [first / "nvme0n1p1", second])
    striped = drive_of(directory, proc=proc, sysfs=sysfs)
    assert (striped.device, striped.disks) == ("md0", ("nvme0n1", "nvme1n1"))
    wear = {"nvme0n1": SmartLog(10, 1), "nvme1n1": SmartLog(60, 1)}
    monkeypatch.setattr("ssdtrain.storage.drive.read_smart", lambda path: wear[path.name])
    assert striped.smart() == SmartLog(60, 1)  # the most worn


def test_a_loop_device_leads_to_the_disk_of_its_file(kernel: tuple[Path, Path, Path], tmp_path: Path) -> None:
    directory, proc, sysfs = kernel
    number = os.stat(directory).st_dev
    text = f"{os.major(number)}:{os.minor(number)}"
    image = tmp_path / "absent" / "image"
    loop = stacked(sysfs, text, "loop3", [])
    (loop / "loop").mkdir()
    (loop / "loop/backing_file").write_text(f"{image}\n")
    assert drive_of(directory, proc=proc, sysfs=sysfs).device == "loop3"  # the file is not visible here
    image.parent.mkdir()
    image.write_text("")
    asked = []

    def backing(path: Path, **_: Path) -> Drive:
        asked.append(path)
        return Drive(str(path), "/", "xfs", "nvme9n1", "", 1, False, ("nvme9n1",))

    original = drive_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssdtrain.storage.drive.drive_of", backing)
        assert original(directory, proc=proc, sysfs=sysfs).device == "nvme9n1"
    assert asked == [image.parent]


def test_a_directory_without_a_disk_still_has_a_size(tmp_path: Path, kernel: tuple[Path, Path, Path]) -> None:
    directory, proc, _ = kernel
    drive = drive_of(directory, proc=proc, sysfs=tmp_path / "empty")
    assert drive.device == "" and drive.size > 0
    assert drive.smart() is None


def test_this_machine_answers(tmp_path: Path) -> None:
    drive = drive_of(tmp_path)
    assert drive.mount and drive.filesystem and drive.size >= drive.free_bytes() > 0


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


def test_a_rating_says_how_fast_the_drives_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    year = 365 * 86400
    one = tmp_path / "one"
    one.mkdir()
    worn(monkeypatch, None)
    # A write of its capacity a day over 5 years, used up in 2.
    assert Endurance([one], rating=Rating(1.0, None, 2.0)).allowed_rate({}) == pytest.approx(
        10**12 * 365 * 5 / (2 * year)
    )
    total = Endurance([one], [[one]], Rating(total=6 * 10**14, years=3.0))
    assert total.allowed_rate({str(one): 5}) == pytest.approx(6e14 / 2 / (3 * year))  # for one of two ranks
    # Where there is no disk the config's rating still holds.
    worn(monkeypatch, None, device="")
    assert Endurance([one]).allowed_rate({}) is None
    assert Endurance([one], rating=Rating(total=10**12, years=1.0)).allowed_rate({}) == pytest.approx(
        1e12 / year
    )


def test_a_life_is_unknown_without_a_disk_a_write_or_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worn(monkeypatch, None)
    endurance = Endurance([tmp_path])
    assert endurance.life({str(tmp_path): 0}, 1.0) is None
    assert endurance.life({str(tmp_path): 1}, 0.0) is None
    worn(monkeypatch, None, device="")
    assert Endurance([tmp_path]).life({str(tmp_path): 1}, 1.0) is None
