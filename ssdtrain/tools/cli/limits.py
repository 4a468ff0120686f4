"""What the system allows a process: memory of the machine and of its container, pinned memory, open files, NUMA nodes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from ssdtrain.storage import check_host_budget
from ssdtrain.text import size_text
from ssdtrain.tools.cli.finding import GOOD, NOTE, WARNING, Finding

__all__ = ["limits"]

NODES = Path("/sys/devices/system/node")
FEW_FILES = 4096


def limits() -> Iterator[Finding]:
    """Findings about this process's limits, with what to do where one is low."""
    budget = check_host_budget(0, 1)
    yield Finding("free memory", size_text(budget.available), GOOD)
    if budget.cgroup is not None:
        remedy = "offload.host and offload.buffer of all ranks of this node count against it"
        yield Finding("memory left by the container", size_text(budget.cgroup), GOOD, remedy)
    yield memlock(budget.memlock)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    nodes = len([node for node in NODES.glob("node[0-9]*") if node.is_dir()]) or 1
    remedy = "start each rank on the node of its GPU and drive (numactl, or the launcher's binding)"
    yield Finding("NUMA nodes", str(nodes), GOOD, remedy if nodes > 1 else "")


def memlock(limit: int | None) -> Finding:
    """About the bytes that a process may lock; None: no limit."""
    if limit is None:
        return Finding("memlock", "unlimited", GOOD)
    remedy = "enough for CUDA; RDMA needs more: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK= of a service"
    return Finding("memlock", size_text(limit), NOTE, remedy)


def open_files(limit: int) -> Finding:
    """About the descriptors that a process may have, as getrlimit gives them."""
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "unlimited", GOOD)
    if limit >= FEW_FILES:
        return Finding("open files", str(limit), GOOD)
    return Finding(
        "open files", str(limit), WARNING, f"data loaders and collectives open many: ulimit -n {FEW_FILES}"
    )
