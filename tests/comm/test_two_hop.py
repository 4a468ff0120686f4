"""`two_hop: on` is an error where there are no two hops, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ssdtrain.comm.topology import check_two_hop
from ssdtrain.config import ConfigError
from tests.comm.test_collectives import make
from tests.support.ranks import PATIENCE, on_ranks


@pytest.mark.parametrize("nodes", ["aaaa", "abcd", "aaab", "aabbc", "abba"])
def test_nodes_without_two_hops_are_an_error(nodes: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_two_hop(list(nodes))
    (problem,) = error.value.problems
    assert (problem.path, problem.value) == ("ssdtrain.comm.two_hop", "on")
    assert "auto" in problem.allowed
    for fine in ("aabb", "abab", "aaabbb"):
        check_two_hop(list(fine))


def started(rank: int) -> str:
    try:
        make(dp="int8", two_hop="on")
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_say_so_at_start() -> None:
    first, *others = on_ranks(3, started, nodes=["a", "a", "b"])
    assert "ssdtrain.comm.two_hop" in first and "2 on a, 1 on b" in first and "auto" in first
    assert others == [first, first]


def grouped(rank: int) -> int:
    comm = make(dp="int8", dp_gather="int8", tp="int8", two_hop="on")
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    comm.all_reduce(torch.ones(5000), "tp", inside[rank // 2]).wait()
    comm.all_reduce(torch.ones(5000), "dp").wait()
    return sum(found.compressed for found in comm.metrics().values())


def test_groups_inside_a_node_have_one_hop_anyway() -> None:
    assert on_ranks(4, grouped, nodes=["a", "a", "b", "b"]) == [2, 2, 2, 2]


def split(rank: int) -> list[Any]:
    world = dist.group.WORLD
    first, second = (make(dp="int8", two_hop="on").router.topology(world) for _ in range(2))
    assert (first.inside, first.between) == (second.inside, second.between)
    return [
        group._get_backend(torch.device("cpu")).options._timeout
        for group in (world, first.inside, first.between)
    ]


def test_subgroups_wait_as_long_as_their_group_and_are_made_once() -> None:
    """A process that attaches again would gain threads, and on a device memory, each time."""
    for found in on_ranks(4, split, nodes=["a", "a", "b", "b"]):
        assert found == [PATIENCE] * 3  # torch's default is half an hour
