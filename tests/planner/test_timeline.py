"""The cost model against time lines worked out by hand. Times in seconds, blocks of 100 bytes, forward 1 s,
backward 2 s unless said."""

from dataclasses import replace
from typing import Any

import pytest

from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import (
    KEPT,
    RECOMPUTE,
    Block,
    Choice,
    Link,
    Machine,
    Pass,
    StepTimeline,
    Tier,
    one_after_the_other,
    one_forward_one_backward,
)

SSD = Choice("ssd")


def block(name: str = "b", forward: float = 1.0, backward: float = 2.0, **more: Any) -> Block:
    given = {"saved": 100, "inputs": 10, **more}
    return Block(name, forward, backward, recompute=1.0, first_operator=forward, **given)


def machine(write: float = 100.0, read: float = 100.0, *, link: Link | None = None, **more: float) -> Machine:
    return Machine((Tier("ssd", write, read),), link, **more)


def step(choices: list[Choice], on: Machine, *, order: list[Pass] | None = None, **more: int) -> StepTimeline:
    blocks = [block(f"b{i}", **more) for i in range(len(choices))]
    return simulate([blocks], [choices], order or one_after_the_other(), on)


def test_keeping_everything_takes_the_time_of_its_blocks_and_all_their_memory() -> None:
    found = step([KEPT] * 3, machine())
    assert (found.seconds, found.compute_seconds, found.stall) == (9.0, 9.0, 0.0)
    assert (found.peak_bytes, found.peak_seconds) == (300, 2.0)
    assert found.written == {"ssd": 0}


def test_a_store_that_ends_during_the_next_block_frees_its_memory_then() -> None:
    # b0 [0,1], written [1,2]; b1 [1,2], kept; b2 [2,3], kept. b0 is read from 3 (backward begins) to 4, used
    # from 7.
    found = step([SSD, KEPT, KEPT], machine())
    assert (found.seconds, found.stall) == (9.0, 0.0)
    # At 1: b0 (being written) and b1. At 2: b0 goes, b2 comes. From 3: b0 comes back.
    assert found.peak_bytes == 300
    assert found.peak_seconds == 3.0
    assert (found.written["ssd"], found.read["ssd"]) == (100, 100)
    assert found.blocks[0][0].hidden


def test_reads_wait_for_room_so_that_the_peak_stays_low() -> None:
    # The most is at 5: b2's backward ends and b1's begins, of which nothing was read ahead before b2's has
    # begun.
    found = step([SSD, SSD, KEPT], machine(prefetch=100))
    # b1 is read [3,4] while b2 (3 to 5) is used, b0 from 5, when b1's own use begins, to 6, for 7.
    assert (found.seconds, found.stall, found.peak_bytes) == (9.0, 0.0, 200)


def test_a_slow_read_stalls_backward_and_the_block_it_belongs_to_is_named() -> None:
    # b0 is written [1,2]. Read at 25 B/s from 3 to 7: b2 and b1 are backward until 7: just hidden. At 20 B/s
    # until 8: one second late.
    assert step([SSD, KEPT, KEPT], machine(read=25)).stall == 0.0
    found = step([SSD, KEPT, KEPT], machine(read=20))
    assert (found.load_stall, found.store_stall, found.seconds) == (1.0, 0.0, 10.0)
    assert [times.load_stall for times in found.blocks[0]] == [1.0, 0.0, 0.0]


def test_forward_waits_when_too_many_bytes_are_under_way() -> None:
    # 50 B/s: b0 is written [1,3], b1 [3,5]. With 100 in flight, b1's store at 2 waits until 3; b2's at 4
    # until 5.
    found = step([SSD, SSD, SSD, KEPT], machine(write=50, read=1000, in_flight=100))
    assert found.store_stall == 2.0
    assert [times.store_stall for times in found.blocks[0]] == [1.0, 1.0, 0.0, 0.0]


def test_where_the_host_computes_what_leaves_costs_the_time_of_beginning_its_stores_and_bringing_it_back() -> (
    None
):
    # b0 is stored from 1.25 on, b1 from 2.5 on. What is kept or recomputed costs nothing of that.
    found = step([SSD, SSD, KEPT, RECOMPUTE], machine(read=1000), storing=0.25)
    assert (found.seconds, found.compute_seconds, found.stall) == (13.5, 13.5, 0.0)
    found = step([SSD, SSD, KEPT, RECOMPUTE], machine(read=1000), loading=0.5)
    assert (found.seconds, found.compute_seconds, found.stall) == (14.0, 14.0, 0.0)
    # At 20 B/s b1 is not written when backward comes, and stays: it is not brought back.
    found = step([SSD, SSD, KEPT], machine(write=20, read=1000), loading=0.5)
    assert (found.read["ssd"], found.seconds) == (0, step([SSD, SSD, KEPT], machine(write=20)).seconds)
    parts = (block("b0", 0.5, 1.0, saved=50, storing=0.25), block("b0", 0.5, 1.0, saved=50, storing=0.0))
    assert simulate([[block(parts=parts)]], [[SSD]], one_after_the_other(), machine()).compute_seconds == 3.25


def test_a_store_that_has_not_begun_when_backward_comes_is_cancelled() -> None:
    # 20 B/s: b0 is written [1,6]; b1's write would begin at 6, and backward asks for it at 3, when b2 begins:
    # it stays.
    found = step([SSD, SSD, KEPT], machine(write=20, read=1000))
    assert found.written["ssd"] == 100
    # b1 stays, and b0's write is under way at 3, so it stays too.
    assert (found.read["ssd"], found.stall, found.peak_bytes) == (0, 0.0, 300)
    assert [times.stored for times in found.blocks[0]] == [100, 0, 0]


def test_behind_a_link_tensors_leave_when_more_than_the_window_is_on_the_device() -> None:
    # A store begins in the hook of the next block, its copy is queued behind that. Copies at 100 B/s: b0 [2,3], b1 [3,4],
    # b2 [4,5]. The newest two stay whatever the window. So b0's tensor goes in the hook of b3, when its copy has ended, and b1's
    # in that of b4: nothing waits. What has not left when backward begins stays.
    link = Link(100, 100)
    found = step([SSD] * 5, machine(1000, 1000, link=link, window=100, hook=0.0))
    assert (found.store_stall, found.load_stall) == (0.0, 0.0)
    assert found.peak_bytes == 400
    # The host has waited for nothing, and queues backward before any write has begun: all are cancelled.
    assert (found.written["ssd"], found.read["ssd"]) == (0, 0)
    # A host that takes a second for a block: b0 and b1 are written by then. b1's bytes are still in its staging buffer.
    slow_host = step([SSD] * 4, machine(1000, 1000, link=link, window=100, hook=1.0))
    assert (slow_host.written["ssd"], slow_host.read["ssd"]) == (200, 100)
    # A link half as fast: b0 [2,4], b1 [4,6], b2 [6,8]. b3's hook waits for b0 from 3 on and that of b4 for b1 from 5 on.
    slow = step([SSD] * 5, machine(1000, 1000, link=Link(50, 1000), window=100, hook=0.0))
    assert slow.store_stall > 0 and slow.peak_bytes == 400


def test_no_more_than_the_window_is_on_the_device_ahead_of_its_use() -> None:
    # Links and drive are so fast that only limits count. When backward begins the last two have not left, because the host
    # queues backward before their stores end. They are there until it waits for a read: beside the block that was read,
    # and two that are back ahead of their use.
    fast = machine(1e6, 1e6, link=Link(1e6, 1e6), window=200)
    found = step([SSD] * 20, fast)
    assert (found.peak_bytes, round(found.stall, 2)) == (500, 0.0)


def test_tensors_leave_a_device_in_the_order_of_the_host_which_does_not_wait_for_their_stores() -> None:
    # Copies and writes take 0.1 s, but nothing waits for that of b0 before backward is queued: its tensor stays.
    link = Link(1000, 1000)
    found = step([SSD, KEPT, KEPT], machine(1000, 1000, link=link, window=100, hook=0.0))
    assert (found.stall, found.peak_bytes, found.read["ssd"]) == (0.0, 300, 0)
    # With 100 in flight the host waits for each store before the next begins, when the next operator has its memory: while b2
    # runs, b0 has not left yet. b1's copy is queued behind b2, [3,3.1]; its write ends at 3.2, which backward waits for.
    few = step([SSD] * 3, machine(1000, 1000, link=link, window=200, in_flight=100, hook=0.0))
    assert (few.stall, few.peak_bytes) == (pytest.approx(0.2), 300)


def test_an_idle_drive_of_a_cpu_begins_writes_together() -> None:
    # b0 is written with b1, from 2 on, when more than 100 bytes are queued: [2,2.2].
    found = step([SSD, SSD, KEPT, KEPT], machine(1000, 1000, together=100, prefetch=100))
    assert found.peak_bytes == 300  # b0, b1, and b2 from 2 on
    assert step([SSD, SSD, KEPT, KEPT], machine(1000, 1000, prefetch=100)).peak_bytes == 200


@pytest.mark.parametrize("write", [1, 100, 10_000])
def test_in_order_the_peak_does_not_depend_on_the_drive(write: int) -> None:
    # With room for one b0 leaves in the hook of b2, when that has its memory, and b1 in that of b3: two and the next one. b2 is
    # left when backward begins, and stays. Loads come into buffers of 50 bytes.
    found = step([SSD, SSD, SSD, KEPT], machine(write, 1000, in_flight=100, in_order=True, buffers=50))
    assert (found.peak_bytes, found.peak_seconds) == (350, pytest.approx(2 + found.blocks[0][0].store_stall))
    assert found.read["ssd"] == 200
    assert found.stall == pytest.approx({1: 198, 100: 0, 10_000: 0}[write])


def test_what_the_program_has_too_is_there_though_it_leaves() -> None:
    blocks = [block("b0", held=30, held_blocks=3), *(block(f"b{number}", held=10) for number in (1, 2, 3))]
    on = machine(10_000, 1000, in_flight=100, in_order=True, buffers=50)
    found = simulate([blocks], [[SSD, SSD, SSD, SSD]], one_after_the_other(), on)
    assert found.peak_bytes == 380  # 30 of b0 while b3 runs; those of b1 are in flight as long as b1 runs
    without = simulate([[block(f"b{number}") for number in range(4)]], [[SSD] * 4], one_after_the_other(), on)
    assert without.peak_bytes == 350


def test_tensors_of_one_operator_leave_after_it() -> None:
    parts = [block("q", 0.5, 1.0, continues=True), block("k", 0.5, 1.0), block("out", 1.0, 2.0)]
    whole = block("b", 2.0, 4.0, saved=300, parts=tuple(parts))
    apart = replace(whole, parts=tuple(replace(part, continues=False) for part in parts))
    on = machine(10_000, 1000, buffers=50)
    peaks = [simulate([[one]], [[SSD]], one_after_the_other(), on).peak_bytes for one in (whole, apart)]
    assert peaks == [350, 250]


def test_recomputation_keeps_inputs_and_runs_forward_again() -> None:
    found = step([RECOMPUTE] * 3, machine())
    assert (found.seconds, found.compute_seconds) == (12.0, 12.0)
    # At the end of forward: 3 inputs. b2 whole again beside two inputs; the same in forward.
    assert found.peak_bytes == 120
    # Inputs go to the drive: 10 bytes at 100 B/s are written before the next block has ended.
    offloaded = step([Choice("ssd", recompute=True)] * 3, machine())
    assert (offloaded.seconds, offloaded.written["ssd"]) == (12.0, 30)


def test_bytes_that_no_choice_moves_are_counted() -> None:
    kept = step([KEPT, KEPT], machine(), fixed=7, forward_transient=1000, backward_transient=3)
    assert kept.peak_bytes == 214 + 1000
    assert kept.peak_seconds == 1.0


def test_one_forward_one_backward_has_several_tapes_alive() -> None:
    order = one_forward_one_backward(4, 2)
    assert [(one.kind[0], one.microbatch) for one in order] == [
        ("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("f", 3), ("b", 2), ("b", 3)
    ]  # fmt: skip
    assert step([KEPT], machine(), order=order).peak_bytes == 200
    assert step([KEPT], machine(), order=one_after_the_other(4)).peak_bytes == 100
    # f0 [0,1] is written [1,1.5], and read from 2, when its backward would begin, to 2.5. The others are
    # still being written when the backward before theirs begins, which is when their reads would: they stay.
    found = step([SSD], machine(write=200, read=200), order=order)
    assert (found.seconds, found.load_stall, found.read["ssd"]) == (12.5, 0.5, 100)


def test_the_next_tape_is_read_while_the_present_one_is_used() -> None:
    # f0 [0,1], f1 [1,2], f2 [2,3] written within 0.1 s each; b0 [3.1,5.1] waits for its read alone.
    order = [Pass("forward", n) for n in range(3)] + [Pass("backward", n) for n in range(3)]
    found = step([SSD, KEPT], machine(1000, 1000), order=order)
    assert found.stall == 0.0


def test_reads_and_writes_of_a_shared_tier_take_turns() -> None:
    # Two microbatches, 1F1B: b0's read and f2's write meet. At 100 B/s each way alone nothing waits; sharing,
    # the drive is busy longer.
    order = one_forward_one_backward(6, 3)
    apart = Machine((Tier("ssd", 60, 60),))
    together = Machine((Tier("ssd", 60, 60, shared=True),))
    blocks = [[block("a"), block("b")]]
    choices = [[SSD, SSD]]
    assert (
        simulate(blocks, choices, order, apart).seconds < simulate(blocks, choices, order, together).seconds
    )


def test_a_full_tier_leaves_the_rest_on_the_device() -> None:
    found = simulate(
        [[block(f"b{i}") for i in range(3)]],
        [[SSD] * 3],
        one_after_the_other(),
        Machine((Tier("ssd", 100, 100, capacity=150),)),
    )
    assert (found.written["ssd"], found.tier_peak["ssd"]) == (100, 100)


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 blocks and 2 choices"):
        simulate([[block()]], [[KEPT, KEPT]], one_after_the_other(), machine())
    with pytest.raises(KeyError, match="tape"):
        step([Choice("tape")], machine())


def test_an_arena_in_the_memory_of_activations_is_part_of_the_peak_and_what_comes_back_lies_in_it() -> None:
    blocks = [[Block(f"b{i}", 1.0, 2.0, 100) for i in range(4)]]
    choices = [[Choice("ssd")] * 3 + [KEPT]]
    tier = Tier("ssd", 1000.0, 1000.0)
    without = simulate(blocks, choices, one_after_the_other(), Machine((tier,), prefetch=200), steps=2)
    arena = Machine((tier,), prefetch=200, buffers=250)
    within = simulate(blocks, choices, one_after_the_other(), arena, steps=2)
    assert within.seconds == without.seconds
    # The most is alive while the last block runs forward, whose neighbour has not left: the arena is there too.
    assert within.peak_bytes == 200 + 250
    kept = simulate(blocks, [[KEPT] * 4], one_after_the_other(), arena)
    assert kept.peak_bytes == 400 + 250
