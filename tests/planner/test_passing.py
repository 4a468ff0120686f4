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


def test_only_gradients_of_the_last_backward_are_used_up_and_not_written() -> None:
    one = Block("", 1.0, 2.0, GB, forward_loads=GB, backward_loads=2 * GB, backward_stores=GB, cpu_step=1.0)
    drive = Tier("ssd", 10.0 * GB, 10.0 * GB)
    machine = Machine((drive,), Link(10 * GB, 10 * GB), state=drive, steps_inside=True)
    found = simulate([[one] * 4], [[KEPT] * 4], one_after_the_other(3), machine)
    assert found.written["ssd"] == (3 - 1) * 4 * GB


def stepped(
    cpu: float, *, inside: bool, link: float | None = None, stays: bool = False, steps: int = 1
) -> StepTimeline:
    """Three blocks of 1 s and 2 s, each with 1 GB of parameters, which a CPU steps in `cpu` seconds."""
    loads = 0 if stays or link is None else GB
    one = Block("", 1.0, 2.0, GB, forward_loads=loads, backward_loads=loads, cpu_step=cpu)
    rate = None
    if link is not None:
        rate = Link(link * GB, link * GB)
        one = replace(one, backward_stores=GB, returns=GB if stays else 0)
    machine = Machine((), rate, steps_inside=inside)
    return simulate([[one] * 3], [[KEPT] * 3], one_after_the_other(), machine, steps=steps)


def test_steps_on_cpus_hide_behind_backward_and_only_the_last_one_is_waited_for() -> None:
    found = stepped(1.0, inside=True)
    assert found.seconds == pytest.approx(9 + 1) and found.step_wait == pytest.approx(1)
    # Slower ones follow each other from the first gradients on, which are there after 5 s.
    assert stepped(4.0, inside=True).seconds == pytest.approx(5 + 3 * 4)


def test_steps_behind_the_passes_hide_behind_the_next_forward() -> None:
    assert stepped(1.0, inside=False).seconds == pytest.approx(9 + 1)
    # The third block is there 12 s after the passes, and its forward begins 2 s after that of the first.
    assert stepped(4.0, inside=False).seconds == pytest.approx(9 + 12 - 2)


@pytest.mark.parametrize("inside", [True, False])
def test_each_of_several_steps_waits_for_the_cpus_of_the_one_before(inside: bool) -> None:
    assert stepped(4.0, inside=inside, steps=4).seconds == pytest.approx(stepped(4.0, inside=inside).seconds)


def test_what_stays_on_a_device_comes_back_behind_its_step() -> None:
    # The last gradients leave for 1 s, are stepped for 1 s, and the parameters come back in 1 s.
    assert stepped(1.0, inside=True, link=1.0, stays=True).seconds == pytest.approx(9 + 3)
    passing, alone = stepped(1.0, inside=True, link=1.0), played(1.0, stores=GB)
    assert passing.seconds - passing.step_wait == pytest.approx(alone.seconds)
    assert passing.step_wait == pytest.approx(3 - 1)  # the load of the first block is in the passes


def test_a_thread_with_two_blocks_of_a_device_is_waited_for_in_backward() -> None:
    found = stepped(6.0, inside=True, link=1.0, stays=True)
    # Gradients are there at 6 s, the steps end at 12, 18 and 24 s; behind the last one its parameters come.
    assert found.seconds == pytest.approx(25)
    assert found.step_wait == pytest.approx(25 - 12)


def test_with_several_microbatches_the_last_backward_steps() -> None:
    one = Block("", 1.0, 2.0, GB, cpu_step=4.0)
    machine = Machine((), steps_inside=True)
    found = simulate([[one] * 3], [[KEPT] * 3], one_after_the_other(2), machine)
    assert found.seconds == pytest.approx(9 + 5 + 3 * 4)
