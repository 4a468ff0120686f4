"""Model state that passes through the device in the cost model: when it comes, and what waits for it."""

from dataclasses import replace

import pytest

from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import (
    KEPT,
    Block,
    Choice,
    Link,
    Machine,
    StepTimeline,
    Tier,
    one_after_the_other,
)

GB = 10**9


def played(
    link: float, *, stores: int = 0, drives: float | None = None, buffers: int = 2, away: bool = False
) -> StepTimeline:
    """Three blocks of 1 s and 2 s, each with 1 GB of parameters."""
    one = Block("", 1.0, 2.0, GB, forward_loads=GB, backward_loads=GB, backward_stores=stores)
    state = None if drives is None else Tier("ssd", drives * GB, drives * GB)
    rate = Link(link * GB, link * GB)
    tiers = (state or Tier("ssd", 100.0 * GB, 100.0 * GB),)
    machine = Machine(tiers, rate, window=GB, state=state, state_buffers=buffers)
    choice = Choice("ssd") if away else KEPT
    return simulate([[one] * 3], [[choice] * 3], one_after_the_other(), machine)


def test_loads_hide_behind_the_block_before_and_the_last_blocks_are_still_there_in_backward() -> None:
    found = played(1.0)
    # 1 s for the first; the third block's buffer is free, and backward has blocks 3 and 2 at once.
    assert found.seconds == pytest.approx(1 + 9)
    assert found.load_stall == pytest.approx(1)
    assert [times.load_stall for times in found.blocks[0]] == pytest.approx([1, 0, 0])


def test_a_slow_link_is_waited_for() -> None:
    # Forward has the blocks at 2, 4 and 6 s. In backward the first comes when the third is over, at 9 s, and takes 2 s.
    assert played(0.5).seconds == pytest.approx(13)


def test_with_one_buffer_nothing_is_loaded_ahead() -> None:
    # 3 loads in forward and 2 in backward, each after the block before.
    assert played(1.0, buffers=1).seconds == pytest.approx(9 + 5)


def test_a_buffer_is_free_when_its_gradients_have_left() -> None:
    found = played(1.0, stores=4 * GB)
    # Block 3 ends at 6 s, its gradients leave until 10 s, the parameters of block 1 come until 11 s.
    assert found.seconds == pytest.approx(11 + 2)


def test_state_on_drives_is_read_ahead_through_host_memory() -> None:
    found = played(1000.0, drives=0.5)
    # Reads end at 2, 4 and 6 s; that of block 1 for backward begins at 6 s, since one of two buffers is free then.
    assert found.seconds == pytest.approx(2 + 1 + 1 + 1 + 1 + 1 + 6, abs=0.01)
    assert found.read["ssd"] == 4 * GB


def test_activations_and_state_share_the_link() -> None:
    alone = played(0.5).seconds
    assert played(0.5, away=True).seconds > alone


def test_blocks_without_passing_state_take_as_long_as_before() -> None:
    block = Block("", 1.0, 2.0, GB)
    machine = Machine((), Link(GB, GB))
    plain = simulate([[block] * 3], [[KEPT] * 3], one_after_the_other(), machine)
    other = simulate(
        [[block] * 3], [[KEPT] * 3], one_after_the_other(), replace(machine, state=Tier("ssd", 1.0, 1.0))
    )
    assert plain.seconds == other.seconds == 9


def test_gradients_do_not_wait_for_writes_that_a_cpu_defers() -> None:
    one = Block("", 1.0, 2.0, GB, forward_loads=GB, backward_loads=GB, backward_stores=GB)
    drive = Tier("ssd", 10.0 * GB, 10.0 * GB)
    machine = Machine((drive,), together=100 * GB, state=drive)
    choices = [[Choice("ssd"), KEPT, KEPT, KEPT]]
    seconds = simulate([[one] * 4], choices, one_after_the_other(), machine, steps=2).seconds
    assert 12.0 <= seconds < 13.0
