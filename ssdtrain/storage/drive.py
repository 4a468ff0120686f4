"""The drive behind a directory: model, size, free space, wear, bytes written."""

import ctypes
import fcntl
import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

logger = logging.getLogger(__name__)

SECTOR = 512
"""Bytes per sector in /sys/block/*/stat, whatever the drive's own sectors are."""

DATA_UNIT = 512_000
"""Bytes per data unit of an NVMe SMART log (NVM Express base specification, log page 02h)."""


@dataclass(frozen=True)
class Drive:
    """The whole disk below a directory. `device` is "" where there is none (tmpfs, overlay, network)."""

    directory: str
    mount: str
    filesystem: str
    device: str
    model: str
    size: int
    """Bytes of the disk; of the file system where there is no disk."""
    rotational: bool
    """Whether the kernel calls it rotational; some virtual SSDs report True."""
    disks: tuple[str, ...] = ()
    """The disks that `device` consists of (md, dm); of a disk itself its name."""

    def free_bytes(self) -> int:
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize

    def smart(self) -> "SmartLog | None":
        """The SMART log of the drive, of several disks that of the most worn; None if there is no NVMe drive, or this user may
        not read it."""
        logs = [read_smart(Path("/dev") / disk) for disk in self.disks if disk.startswith("nvme")]
        return max(
            (log for log in logs if log is not None), key=lambda log: log.percentage_used, default=None
        )


@dataclass(frozen=True)
class SmartLog:
    percentage_used: int
    """Used part of the rated endurance, in percent; may exceed 100."""
    data_bytes_written: int


def drive_of(directory: str | Path, *, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> Drive:
    """Find the disk behind a directory by its device number and the mount table: behind an overlay that of its upper directory,
    behind a loop device that of its file, behind dm (LVM, encryption) and md the disks that they lie on.

    Raises:
        OSError: the directory does not exist.
    """
    path = Path(directory).resolve()
    number = os.stat(path).st_dev
    mount, filesystem, source, upper = _mount_of(path, number, proc)
    block = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    if not block.exists() and source.startswith("/dev/") and Path(source).exists():
        # btrfs and others give their files a device number of their own; the mount's source is the disk.
        number = os.stat(source).st_rdev
        block = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    status = os.statvfs(path)
    size = status.f_blocks * status.f_frsize
    if not block.exists() and filesystem == "overlay" and _leads_on(upper, path):
        below = drive_of(upper, proc=proc, sysfs=sysfs)
        return replace(below, directory=str(path), mount=mount)
    if not block.exists():
        return Drive(str(path), mount, filesystem, "", "", size, False)
    disk = _whole(block.resolve())
    backing = Path(_read(disk / "loop/backing_file") or "/")
    if backing.is_file():
        return replace(drive_of(backing.parent, proc=proc, sysfs=sysfs), directory=str(path), mount=mount)
    disks = _leaves(disk)
    if disk.name.startswith("dm-") and len(disks) == 1:
        disk = disks[0]
    return Drive(
        str(path),
        mount,
        filesystem,
        disk.name,
        _read(disk / "device/model"),
        int(_read(disk / "size") or 0) * SECTOR or size,
        _read(disk / "queue/rotational") == "1",
        tuple(leaf.name for leaf in disks),
    )


def _leads_on(upper: str, path: Path) -> bool:
    """Whether the upper directory of an overlay can be looked at, and is not where the look came from: from inside of a
    container it may lie on the same overlay."""
    return bool(upper) and Path(upper).is_dir() and Path(upper).resolve() != path


def _whole(block: Path) -> Path:
    """The disk of a partition, or the device itself."""
    return block.parent if (block / "partition").exists() else block


def _leaves(device: Path) -> list[Path]:
    """The disks that a device lies on, each once."""
    below = sorted((device / "slaves").glob("*")) if (device / "slaves").is_dir() else []
    if not below:
        return [device]
    found = {leaf: None for link in below for leaf in _leaves(_whole(link.resolve()))}
    return list(found)


def _mount_of(path: Path, number: int, proc: Path) -> tuple[str, str, str, str]:
    """(mount point, file system, source, upper directory of an overlay) of the innermost mount that holds `path`."""
    wanted = f"{os.major(number)}:{os.minor(number)}"
    best = ("", "", "", "")
    try:
        mounts = (proc / "self/mountinfo").read_text(errors="surrogateescape")
    except FileNotFoundError:  # /proc is not mounted: /sys knows the disk by its number
        return best
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        point = _unescaped(fields[4])
        inside = path == Path(point) or Path(point) in path.parents
        # A later mount on the same point hides the earlier one, hence >=.
        if inside and fields[2] == wanted and len(point) >= len(best[0]):
            filesystem, source, *options = after.split()
            upper = re.search(r"(?:^|,)upperdir=([^,]*)", options[0]) if options else None
            best = (point, filesystem, source, _unescaped(upper[1]) if upper else "")
    return best


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


class _AdminCommand(ctypes.Structure):
    """struct nvme_admin_cmd of linux/nvme_ioctl.h."""

    _fields_ = [
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("reserved", ctypes.c_uint16),
        ("namespace", ctypes.c_uint32),
        ("cdw2", ctypes.c_uint32),
        ("cdw3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("metadata_length", ctypes.c_uint32),
        ("data_length", ctypes.c_uint32),
        *[(f"cdw{n}", ctypes.c_uint32) for n in range(10, 16)],
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    ]


_NVME_IOCTL_ADMIN_CMD = 0xC0484E41
_GET_LOG_PAGE, _SMART_LOG, _LOG_BYTES = 0x02, 0x02, 512


def read_smart(device: Path) -> SmartLog | None:
    """Read the SMART log of an NVMe drive. Returns None, with a debug message, without permission (usually root only)."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    command = _AdminCommand(
        opcode=_GET_LOG_PAGE,
        namespace=0xFFFFFFFF,
        address=ctypes.addressof(log),
        data_length=_LOG_BYTES,
        cdw10=_SMART_LOG | (_LOG_BYTES // 4 - 1) << 16,
    )
    try:
        with device.open("rb") as file:
            status = fcntl.ioctl(file, _NVME_IOCTL_ADMIN_CMD, command)
    except OSError as error:
        logger.debug("no SMART log from %s: %s", device, error)
        return None
    if status:
        logger.debug("no SMART log from %s: NVMe status %#x", device, status)
        return None
    return parse_smart(log.raw)


def parse_smart(log: bytes) -> SmartLog:
    """Byte 5 is the percentage used, bytes 48 to 63 the data units written (little-endian)."""
    return SmartLog(log[5], int.from_bytes(log[48:64], "little") * DATA_UNIT)
