"""Waits for collectives that are under way: in any order, never, after an error."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ssdtrain.comm.meter import CommMetrics, Meter
from ssdtrain.comm.work import ChainedWork, CompressedWork
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
