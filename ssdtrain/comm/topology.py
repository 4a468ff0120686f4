"""The ranks of a group as a grid of nodes and places in them.

Note: [One hop or two]
    A flat all-to-all among L ranks on each of M nodes sends L times the bytes of a ring between nodes, before compression. In
    two hops, ranks of a node exchange first, and each then meets its counterparts on the other nodes with what its node has
    summed. A group inside one node, or with one rank on each, is the same grid with one side of length 1, and that hop is left
    out. Where nodes hold different numbers of ranks there is one hop, all ranks counted as if on nodes of their own.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from ssdtrain.config import ConfigError

NODE = "SSDTRAIN_NODE"

# By group and global ranks: torch has no way to end a group that is safe while a peer may be gone, and each has threads, or
# memory of a device. So all communicators of a process share them.
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def node_name() -> str:
    """Return this node's name: SSDTRAIN_NODE of the environment (for containers that share a host name), or the host's."""
    return os.environ.get(NODE) or socket.gethostname()


@dataclass(frozen=True)
class Topology:
    """Place of this rank in a group.

    `grid[m][l]` is the group rank at place l of node m; this rank is `grid[node][place]`.
    """

    group: dist.ProcessGroup
    grid: tuple[tuple[int, ...], ...]
    node: int
    place: int
    inside: dist.ProcessGroup | None
    """This node's ranks, by place; None where there is one."""
    between: dist.ProcessGroup | None
    """The ranks at this place, by node; None where there is one."""
    nodes: tuple[str, ...]
    """The node of each group rank."""

    @property
    def size(self) -> int:
        return len(self.nodes)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global rank of each group rank."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def rank(self) -> int:
        return self.grid[self.node][self.place]

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The group ranks at each place, by node."""
        return tuple(zip(*self.grid, strict=True))


def grid_of(nodes: Sequence[str], two_hop: bool) -> tuple[tuple[int, ...], ...] | None:
    """Return group ranks by node and place; None where two hops are asked for and the nodes are uneven.

    Args:
        nodes: the node of each group rank.
        two_hop: split by node; else one node, or as many as there are ranks.
    """
    places: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        places.setdefault(node, []).append(rank)
    rows = tuple(tuple(row) for row in places.values())
    if len(rows) == 1:
        return rows
    if not two_hop or max(map(len, rows)) == 1:
        return tuple((rank,) for rank in range(len(nodes)))
    # Subgroups have their ranks in ascending order.
    regular = len({len(row) for row in rows}) == 1 and all(
        list(row) == sorted(row) for row in zip(*rows, strict=False)
    )
    return rows if regular else None


def check_two_hop(hosts: Sequence[str]) -> None:
    """Check that `two_hop: "on"` can be had in this job. All ranks find the same.

    Args:
        hosts: the node of each global rank.

    Raises:
        ConfigError: there is one node, one rank on each, or other numbers or another order of ranks on some.
    """
    grid = grid_of(hosts, True)
    if grid is None or min(len(grid), len(grid[0])) == 1:
        raise _no_two_hops(range(len(hosts)), hosts)


def _no_two_hops(ranks: Sequence[int], nodes: Sequence[str]) -> ConfigError:
    counts = ", ".join(f"{count} on {node}" for node, count in Counter(nodes).items())
    why = (
        f"needs the same number of ranks, at least two, in the same order on each of several nodes; the {len(ranks)} ranks "
        f"{_shortened(ranks)} are {counts} ({NODE} in the environment names a node)"
    )
    return ConfigError.of(
        "ssdtrain.comm.two_hop", "on", why, '"auto", which takes two hops where they can be had'
    )


def _shortened(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))


def find_topology(group: dist.ProcessGroup, hosts: Sequence[str], two_hop: str) -> Topology:
    """Return the grid of `group`, and the subgroups of two hops where there are two. All ranks of the group call it together.

    Args:
        hosts: the node of each global rank.
        two_hop: "auto", "on" or "off".

    Raises:
        ConfigError: two_hop is "on", the group lies on several nodes with several ranks on some, and it cannot be split by
            node. Groups inside a node, or with one rank on each, have one hop anyway.
    """
    ranks = dist.get_process_group_ranks(group)
    nodes = tuple(hosts[rank] for rank in ranks)
    grid = grid_of(nodes, two_hop != "off")
    if grid is not None and min(len(grid), len(grid[0])) > 1 and not _can_split(group):
        grid = None
    if grid is None:
        if two_hop == "on":
            raise _no_two_hops(ranks, nodes)
        grid = grid_of(nodes, False)
        assert grid is not None
    me = dist.get_rank(group)
    node, place = next((m, row.index(me)) for m, row in enumerate(grid) if me in row)
    across, within = len(grid), len(grid[0])
    inside = between = None
    if across == 1:
        inside = group if within > 1 else None
    elif within == 1:
        between = group
    else:
        inside = _subgroup(group, [ranks[rank] for rank in grid[node]])
        between = _subgroup(group, [ranks[row[place]] for row in grid])
    return Topology(group, grid, node, place, inside, between, nodes)


def _can_split(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of `group` would call a new group alike: its name counts the groups that each rank knows, which
    differs where groups were made on some ranks only."""
    world = getattr(dist.distributed_c10d, "_world", None)
    counts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(counts, len(getattr(world, "pg_names", ())), group=group)
    return len(set(counts)) == 1


def _subgroup(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Return the group of some ranks of `group`, which waits for its messages as long as `group` does."""
    known = _subgroups.setdefault(group, {})
    key = tuple(ranks)
    if key not in known:
        known[key] = dist.new_group(ranks, timeout=_timeout(group), use_local_synchronization=True)
    return known[key]


def _timeout(group: Any) -> timedelta | None:
    """Return the timeout of `group`; None where this torch does not have it: then a new group gets torch's default."""
    backends = (group._get_backend(device) for device in getattr(group, "_device_types", ()))
    return next((getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends), None)


def world_if_none(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or that of all ranks."""
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return group
