"""Waits for collectives that are under way: in any order, never, after an error."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ssdtrain.comm.meter import CommMetrics, Meter
from ssdtrain.comm.work import ChainedWork, CompressedWork
from ssdtrain.config import load_config
from ssdtrain.planner.plan_blocks import PlanBlocks
from ssdtrain.runtime import Runtime
from tests.comm.test_collectives import make
from tests.support.ranks import on_ranks


def waited_in_another_order(rank: int) -> list[float]:
    comm = make(dp="int8", dp_gather="int8")
    tensors = [torch.full((5000,), scale * (rank + 1.0)) for scale in (1, 10, 100)]
    works = [comm.all_reduce(tensor, "dp") for tensor in tensors]
    for index in (0, 2) if rank else (1, 0):
        works[index].wait()
    comm.step_end()  # the one that this rank has not waited for
    return [float(tensor.mean()) for tensor in tensors]


def test_ranks_that_wait_in_other_orders_get_their_own_tensors() -> None:
    for found in on_ranks(2, waited_in_another_order):
        assert found == pytest.approx([3, 30, 300], rel=0.01)


class Message:
    """One under way, of a peer that is gone or not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def work(line: deque[CompressedWork], *messages: Message) -> CompressedWork:
    def steps() -> Iterator[Any]:
        yield from messages

    return CompressedWork([steps()], CommMetrics(), Meter(), line=line)


def test_what_failed_fails_at_every_wait_and_so_does_what_was_issued_after_it() -> None:
    line: deque[CompressedWork] = deque()
    first, failing, after = (
        work(line, Message()),
        work(line, Message(RuntimeError("gone")), Message()),
        work(line, Message()),
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            after.wait()
        with pytest.raises(RuntimeError, match="gone"):
            failing.wait()
    assert first.wait()


def test_what_could_not_be_decoded_fails_at_every_wait() -> None:
    def decode() -> None:
        raise ValueError("another codec's payload")

    chained = ChainedWork(None, decode)
    for _ in range(2):
        with pytest.raises(ValueError, match="another codec"):
            chained.wait()


def raising_inside_of_a_step(rank: int, config: dict[str, Any]) -> str:
    layer = nn.Linear(8, 8)
    runtime = Runtime(load_config(config), plan_blocks=PlanBlocks({"layer": layer}, group=dist.group.WORLD))
    with pytest.raises(ZeroDivisionError) as raised, runtime.step():
        with runtime.forward():
            layer(torch.ones(2, 8))
        if rank == 0:
            raise ZeroDivisionError("this rank's")
        dist.recv(torch.empty(1), 0)  # as in a collective: what rank 0 sends next has to be this
        raise ZeroDivisionError("the other's")
    if rank == 0:
        dist.send(torch.empty(1), 1)
    return str(raised.value)


@pytest.mark.parametrize(
    "config",
    [{"comm": {"dp": "int8", "min_bytes": 0, "probe": False}}, {"plan": {"device_limit": "64MiB"}}],
    ids=["comm", "plan"],
)
def test_an_exception_inside_of_a_step_is_not_kept_back_by_an_exchange_between_ranks(
    config: dict[str, Any],
) -> None:
    """It reached the loop after the process group's timeout, as an error about that: the others are in another collective."""
    assert on_ranks(2, raising_inside_of_a_step, config) == ["this rank's", "the other's"]
