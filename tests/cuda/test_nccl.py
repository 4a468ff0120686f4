"""The emulated NCCL keeps NCCL's rules: ProcessGroupNCCL, its streams and its watchdog are those of torch."""

from __future__ import annotations

import os

import pytest

from tests.cuda import nccl_ranks
from tests.support.ranks import on_ranks, survivors

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.mark.parametrize("count", [2, 3])
def test_collectives_give_what_gloo_gives(count: int) -> None:
    on_ranks(count, nccl_ranks.collectives_equal_those_of_gloo)


def test_messages_of_two_ranks_arrive_in_the_order_in_which_they_were_sent() -> None:
    on_ranks(3, nccl_ranks.messages_between_two_ranks_arrive_in_order)


def test_a_collective_is_ordered_by_streams_alone() -> None:
    on_ranks(2, nccl_ranks.a_collective_waits_for_the_stream_and_the_stream_for_it)


def test_a_group_of_some_ranks_is_split_off() -> None:
    results = on_ranks(3, nccl_ranks.a_group_of_some_ranks_is_split_off)
    assert results == [[3.0] * 3 + [2.0] * 3, [3.0] * 3 + [1.0] * 3, [3.0] * 3 + [2.0] * 3]


INVALID_USAGE, REMOTE_ERROR = 5, 6


def test_ranks_that_call_with_different_sizes_get_an_error_and_no_bytes_of_each_other() -> None:
    results = on_ranks(2, nccl_ranks.different_calls_are_an_error)
    assert {error for error, _ in results} <= {INVALID_USAGE, REMOTE_ERROR}
    assert any("expects call" in text for _, text in results)


def test_the_death_of_a_rank_is_an_error_of_the_ranks_that_wait_for_it() -> None:
    results = survivors(2, nccl_ranks.a_rank_that_dies_is_an_error_of_the_others)
    assert results == [(REMOTE_ERROR, "rank 1 is gone")]


def test_an_abort_ends_a_call_that_waits_for_a_rank() -> None:
    on_ranks(2, nccl_ranks.an_abort_ends_what_waits_for_a_rank_that_never_calls)


def test_nothing_is_left_in_shared_memory() -> None:
    on_ranks(2, nccl_ranks.messages_between_two_ranks_arrive_in_order)
    folder = os.environ.get("EMULATED_NCCL_FOLDER", "/dev/shm")
    assert not [name for name in os.listdir(folder) if name.startswith("emulated-nccl-")]
