"""Checks at start whether a node has the host memory that its ranks need, instead of leaving it to the OOM killer."""

import functools
import logging
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from ssdtrain.storage.errors import HostBudgetExceeded
from ssdtrain.text import size_text

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True)
class HostBudget:
    """Host memory required and available on a node, in bytes; None where a limit does not exist."""

    required: int
    available: int
    """MemAvailable of the kernel."""
    cgroup: int | None
    """Free bytes under the memory cgroup's limit, counting its file cache as free."""
    memlock: int | None
    """RLIMIT_MEMLOCK of this process."""

    def share(self, local_world_size: int) -> int:
        """Bytes of one rank, where all ranks of the node take half of what is available."""
        limits = [limit for limit in (self.available, self.cgroup) if limit is not None]
        return min(limits) // (2 * local_world_size)


def check_host_budget(
    per_rank_bytes: int,
    local_world_size: int,
    *,
    subject: str = "ssdtrain.offload.host and buffer",
    locked: bool = False,
    proc: Path = Path("/proc"),
    sysfs: Path = Path("/sys"),
) -> HostBudget:
    """Compare the host memory of all ranks of this node (arena and host tier) with what is available.

    Args:
        per_rank_bytes: host memory of one rank.
        local_world_size: ranks on this node.
        subject: what asks for it, for the error.
        locked: whether the memory counts against RLIMIT_MEMLOCK (mlock, RDMA registration). cudaHostRegister does not.
        proc, sysfs: mount points of procfs and sysfs.

    Raises:
        HostBudgetExceeded: with all limits, and which settings to lower.
    """
    required = per_rank_bytes * local_world_size
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if soft == resource.RLIM_INFINITY else soft
    budget = HostBudget(required, _mem_available(proc), _cgroup_room(proc, sysfs), memlock)
    limits = [("MemAvailable", required, budget.available), ("the memory cgroup", required, budget.cgroup)]
    if locked:
        limits.append(("RLIMIT_MEMLOCK (ulimit -l)", per_rank_bytes, memlock))
    for name, needed, limit in limits:
        if limit is not None and needed > limit:
            raise HostBudgetExceeded(
                f"{subject} would take {local_world_size} x {size_text(per_rank_bytes)} of host memory = "
                f"{size_text(required)} on this node, and {name} allows {size_text(limit)} (MemAvailable "
                f"{_text(budget.available)}, cgroup {_text(budget.cgroup)}, memlock {_text(memlock)}): lower {subject}, run "
                "fewer ranks per node, or raise that limit"
            )
    return budget


def _text(limit: int | None) -> str:
    return "unlimited" if limit is None else size_text(limit)


def _mem_available(proc: Path) -> int:
    try:
        text = (proc / "meminfo").read_text()
    except FileNotFoundError:
        return _all_memory(proc / "meminfo")
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{proc / 'meminfo'} has no MemAvailable line: a kernel of 3.14 or later is needed")


@functools.cache
def _all_memory(missing: Path) -> int:
    """Bytes of memory of the machine, with one warning."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    logger.warning(
        "%s is not there, so free host memory is unknown: what the ranks need is compared with all %d bytes of the machine; "
        "mount /proc in the container",
        missing,
        total,
    )
    return total


def _cgroup_room(proc: Path, sysfs: Path) -> int | None:
    """The smallest free amount under the limits of this process's memory cgroup and its ancestors, in bytes."""
    rooms = []
    membership = proc / "self/cgroup"
    # Without /proc only the root is known, which in a container is its own group.
    for line in membership.read_text().splitlines() if membership.exists() else ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            rooms += _rooms(sysfs / "fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms += _rooms(sysfs / "fs/cgroup/memory", path, *names)
    return min(rooms, default=None)


def _rooms(root: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    # Inside a container the path may be the host's, which is not mounted here: then only the root counts.
    found = []
    group = root / path.lstrip("/")
    while True:
        if (group / limit).exists():
            text = (group / limit).read_text().strip()
            if text != "max" and int(text) < UNLIMITED:
                used = int((group / usage).read_text()) - _statistic(group / "memory.stat", cache)
                found.append(max(0, int(text) - used))
        if group == root or root not in group.parents:
            return found
        group = group.parent


def _statistic(path: Path, name: str) -> int:
    for line in path.read_text().splitlines() if path.exists() else []:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
