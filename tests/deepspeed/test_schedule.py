"""What the adapter reads from DeepSpeed's own schedules."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule as upstream
from hypothesis import given
from hypothesis import strategies as st

from ssdtrain_ds.schedule import Turn, _Announced, read
from tests.deepspeed.conftest import Results
from tests.deepspeed.rows import ROWS, Row


def instructions_of(schedule: Any) -> list[Any]:
    return [instruction for step in schedule for instruction in step]


shapes = st.integers(1, 8).flatmap(
    lambda stages: st.tuples(st.integers(1, 16), st.just(stages), st.integers(0, stages - 1))
)


@given(shapes)
def test_every_instruction_is_about_the_microbatch_that_the_schedule_computed(
    shape: tuple[int, int, int],
) -> None:
    schedule = upstream.TrainSchedule(*shape)
    turns = iter(read(instructions_of(upstream.TrainSchedule(*shape)), stages=shape[1]))
    for step_id, step in enumerate(schedule):
        microbatch, is_forward = schedule._step_to_micro_batch(step_id)
        for instruction in step:
            turn = next(turns)
            if type(instruction) in (upstream.ForwardPass, upstream.BackwardPass):
                assert turn.microbatch == microbatch
                assert turn.chunk == 0
                assert is_forward == (type(instruction) is upstream.ForwardPass)
            else:
                assert turn.microbatch is None


@given(shapes)
def test_loads_may_begin_where_the_stage_waits_for_the_gradient(shape: tuple[int, int, int]) -> None:
    instructions = instructions_of(upstream.TrainSchedule(*shape))
    turns = read(instructions, stages=shape[1])
    for index, instruction in enumerate(instructions):
        if type(instruction) is upstream.RecvGrad:
            following = next(
                turn
                for turn, later in zip(turns[index:], instructions[index:], strict=True)
                if type(later) is upstream.BackwardPass
            )
            assert turns[index].upcoming[0] == (following.chunk, following.microbatch)
        elif type(instruction) is not upstream.BackwardPass:
            assert turns[index].upcoming == ()


@given(shapes)
def test_no_load_is_asked_for_before_its_forward_and_none_after_its_backward(
    shape: tuple[int, int, int],
) -> None:
    instructions = instructions_of(upstream.TrainSchedule(*shape))
    alive: list[tuple[int, int]] = []
    for turn, instruction in zip(read(instructions, stages=shape[1]), instructions, strict=True):
        assert turn.upcoming in ((), tuple(alive))
        if turn.chunk is None or turn.microbatch is None:
            continue
        if type(instruction) is upstream.ForwardPass:
            alive.append((turn.chunk, turn.microbatch))
        else:
            alive.remove((turn.chunk, turn.microbatch))
    assert not alive


@given(shapes)
def test_the_last_of_several_stages_is_kept_and_no_other(shape: tuple[int, int, int]) -> None:
    microbatches, stages, stage = shape
    kept = [turn.keep for turn in read(instructions_of(upstream.TrainSchedule(*shape)), stages=stages)]
    assert sum(kept) == (microbatches if stages > 1 and stage == stages - 1 else 0) or microbatches == 1


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(st.integers(2 * n, 2 * n + 6), st.just(n), st.integers(0, n - 1))
    )
)
def test_dualpipev_has_a_tape_for_each_microbatch_of_each_phase(shape: tuple[int, int, int]) -> None:
    microbatches, stages, _ = shape
    instructions = instructions_of(upstream.DualPipeVSchedule(*shape))
    turns = read(instructions, stages=stages)
    for kind in (upstream.ForwardPass, upstream.BackwardPass):
        tapes = [
            (turn.chunk, turn.microbatch)
            for turn, instruction in zip(turns, instructions, strict=True)
            if type(instruction) is kind
        ]
        assert sorted(tapes) == [(phase, index) for phase in (0, 1) for index in range(microbatches)]
    for turn, instruction in zip(turns, instructions, strict=True):
        if turn.microbatch is not None:
            # Upstream numbers its buffers by phase and microbatch.
            assert instruction.kwargs["buffer_id"] == turn.chunk * microbatches + turn.microbatch


def test_deepspeed_hears_of_each_instruction_before_it_runs() -> None:
    heard: list[Turn] = []
    announced = _Announced(upstream.TrainSchedule(4, 2, 0), heard.append, 2)
    assert announced.num_pipe_buffers() == 2
    turns = read(instructions_of(upstream.TrainSchedule(4, 2, 0)), stages=2)
    count = 0
    for step in announced:
        for _ in step:
            count += 1
            assert heard == turns[:count]
    assert count == len(turns)


@pytest.mark.distributed
@pytest.mark.parametrize("row", [row for row in ROWS if row.name == "pipeline2"], ids=lambda row: row.name)
def test_of_two_stages_the_first_leaves_memory_and_the_last_stays(row: Row, results: Results) -> None:
    first, last = (result["offloaded"]["offload"] for result in results(row))
    assert first["kept_bytes"] == 0
    assert first["offloaded_bytes"] + first["cancelled_bytes"] > 0
    assert last["offloaded_bytes"] == last["cancelled_bytes"] == 0
    assert last["kept_bytes"] > 0
