"""What the adapter reads from DeepSpeed's own schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe import schedule as upstream
from deepspeed.runtime.pipe.engine import PipelineEngine
from hypothesis import given
from hypothesis import strategies as st

from ssdtrain.integration.patching import Patches
from ssdtrain_ds.schedule import Turn, _Announced, patch_pipeline, read
from tests.deepspeed.upstream import LACKS


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


@pytest.mark.skipif("dualpipev" in LACKS, reason=LACKS.get("dualpipev", ""))
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


class Recorder:
    """A runtime and a pipeline engine that write down what happens; the engine's loop over instructions is DeepSpeed's."""

    _exec_schedule = PipelineEngine._exec_schedule

    def __init__(self, stages: int) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.module = SimpleNamespace(num_stages=stages)
        self._INSTRUCTION_MAP = {
            kind: self._executed(kind.__name__) for kind in PipelineEngine._INSTRUCTION_MAP
        }

    def _executed(self, name: str) -> Any:
        return lambda engine, **kwargs: self.heard.append((name,))

    def _reserve_pipe_buffers(self, count: int) -> None:
        self.buffers = count

    def next_backward(self, *tapes: tuple[int, int]) -> None:
        self.heard.append(("next", *tapes))

    @contextmanager
    def recording(self, chunk: int, microbatch: int, *, keep: bool) -> Iterator[None]:
        self.heard.append(("record", chunk, microbatch, keep))
        yield

    @contextmanager
    def backward(self, chunk: int, microbatch: int) -> Iterator[None]:
        self.heard.append(("backward", chunk, microbatch))
        yield

    def patch(self) -> Patches:
        patches = Patches()
        runtime: Any = self
        patch_pipeline(patches, self, runtime, self.recording, lambda: self.heard.append(("batch over",)))
        return patches


def test_loads_begin_before_the_stage_waits_for_the_gradient() -> None:
    first = Recorder(2)
    first.patch()
    first._exec_schedule(upstream.TrainSchedule(3, 2, 0))
    computing = [
        event for event in first.heard if not event[0].startswith(("Load", "Send", "Reduce", "Optimizer"))
    ]
    assert computing == [
        *[("record", 0, 0, False), ("ForwardPass",)],
        *[("record", 0, 1, False), ("ForwardPass",)],
        *[
            ("next", (0, 0), (0, 1)),
            ("RecvGrad",),
            ("next", (0, 0), (0, 1)),
            ("backward", 0, 0),
            ("BackwardPass",),
        ],
        *[("record", 0, 2, False), ("ForwardPass",)],
        *[
            ("next", (0, 1), (0, 2)),
            ("RecvGrad",),
            ("next", (0, 1), (0, 2)),
            ("backward", 0, 1),
            ("BackwardPass",),
        ],
        *[("next", (0, 2)), ("RecvGrad",), ("next", (0, 2)), ("backward", 0, 2), ("BackwardPass",)],
        ("batch over",),
    ]
    assert first.buffers == 2


def test_the_last_stage_keeps_what_it_saves() -> None:
    last = Recorder(2)
    last.patch()
    last._exec_schedule(upstream.TrainSchedule(3, 2, 1))
    assert [event for event in last.heard if event[0] == "record"] == [
        ("record", 0, k, True) for k in range(3)
    ]


def test_evaluation_is_left_alone() -> None:
    engine = Recorder(2)
    engine.patch()
    with torch.no_grad():
        engine._exec_schedule(upstream.InferenceSchedule(3, 2, 0))
    assert {event[0] for event in engine.heard} == {"LoadMicroBatch", "ForwardPass", "SendActivation"}
