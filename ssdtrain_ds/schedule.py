"""Pipelines: which microbatch an instruction is about, and whose backward comes next.

DeepSpeed's instructions name a buffer, not a microbatch, and its engine sees them one by one. The whole stream of a batch is
known in advance, though: it is read once before it runs. A forward is paired with the next backward of its buffer (and, for
DualPipeV, its phase); the n-th forward of a phase is microbatch n.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ssdtrain.integration.patching import Patches, run_inside
from ssdtrain.runtime import Runtime
from ssdtrain_ds import _compat


class Turn(NamedTuple):
    """What one instruction means for the tapes.

    Attributes:
        chunk, microbatch: the tape that a forward makes or a backward needs; None for other instructions.
        keep: a forward whose backward is the next computation: moving its tape would only cost.
        upcoming: (chunk, microbatch) of the backwards to come of forwards already over, next first; where loads may begin.
    """

    chunk: int | None = None
    microbatch: int | None = None
    keep: bool = False
    upcoming: tuple[tuple[int, int], ...] = ()


def read(instructions: list[Any], *, stages: int) -> list[Turn]:
    """What each of `instructions` means, in order.

    Loads may begin at `RecvGrad`, which waits for the neighbour, and at the latest at the backward itself. Where a stage runs
    each backward right after its forward (the last of several stages), forwards are kept. With one stage they are not: there
    is no other place where memory could be saved.
    """
    forward, backward, receive = (
        _compat.schedule.ForwardPass,
        _compat.schedule.BackwardPass,
        _compat.schedule.RecvGrad,
    )
    tape_of: dict[int, tuple[int, int]] = {}
    forward_of: dict[int, int] = {}
    open_forward: dict[tuple[int, int], int] = {}
    counts: dict[int, int] = {}
    computations = []
    for index, instruction in enumerate(instructions):
        kind = type(instruction)
        if kind is not forward and kind is not backward:
            continue
        chunk = _chunk(instruction)
        buffer = (chunk, int(instruction.kwargs["buffer_id"]))
        if kind is forward:
            microbatch = counts.get(chunk, 0)
            counts[chunk] = microbatch + 1
            tape_of[index] = (chunk, microbatch)
            open_forward[buffer] = index
        else:
            forward_of[index] = begun = open_forward.pop(buffer)
            tape_of[index] = tape_of[begun]
        computations.append(index)
    followed_at_once = {
        index for index, following in itertools.pairwise(computations) if forward_of.get(following) == index
    }
    backwards = sorted(forward_of)
    turns = []
    for index, instruction in enumerate(instructions):
        kind = type(instruction)
        upcoming: tuple[tuple[int, int], ...] = ()
        if kind is receive or kind is backward:
            upcoming = tuple(tape_of[b] for b in backwards if b >= index and forward_of[b] < index)
        tape = tape_of.get(index)
        if tape is None:
            turns.append(Turn(upcoming=upcoming))
        else:
            turns.append(Turn(*tape, stages > 1 and index in followed_at_once, upcoming))
    return turns


def _chunk(instruction: Any) -> int:
    return int(instruction.kwargs.get("phase", 0))


class _Announced:
    """A schedule that announces, while DeepSpeed iterates over it, which instruction is about to run."""

    def __init__(self, plain: Any, announce: Callable[[Turn], None], stages: int) -> None:
        self._buffers = plain.num_pipe_buffers()
        self._steps = [list(step) for step in plain]
        self._turns = read([instruction for step in self._steps for instruction in step], stages=stages)
        self._announce = announce

    def num_pipe_buffers(self) -> int:
        return int(self._buffers)

    def __iter__(self) -> Iterator[Iterable[Any]]:
        turns = iter(self._turns)
        for step in self._steps:
            yield self._announced(step, turns)

    def _announced(self, step: list[Any], turns: Iterator[Turn]) -> Iterator[Any]:
        for instruction in step:
            self._announce(next(turns))
            yield instruction


def patch_pipeline(
    patches: Patches,
    engine: Any,
    runtime: Runtime,
    recording: Callable[..., AbstractContextManager[Any]],
    after_batch: Callable[[], None],
) -> None:
    """Make a pipeline engine record its forwards.

    Args:
        recording: as `Runtime.forward`.
        after_batch: called at the end of every training batch.
    """
    stages = _compat.stages_of(engine)
    current = [Turn()]

    def announce(turn: Turn) -> None:
        current[0] = turn
        if turn.upcoming:
            runtime.next_backward(*turn.upcoming)

    def forward(*_: object, **__: object) -> AbstractContextManager[Any]:
        turn = current[0]
        if turn.chunk is None or not torch.is_grad_enabled():
            return nullcontext()
        return recording(turn.chunk, turn.microbatch, keep=turn.keep)

    def backward(*_: object, **__: object) -> AbstractContextManager[Any]:
        turn = current[0]
        return nullcontext() if turn.chunk is None else runtime.backward(turn.chunk, turn.microbatch)

    def table(plain: dict[type, Any]) -> dict[type, Any]:
        contexts = {_compat.schedule.ForwardPass: forward, _compat.schedule.BackwardPass: backward}
        return {**plain, **{kind: run_inside(context)(plain[kind]) for kind, context in contexts.items()}}

    def announced(plain: Callable[..., Any]) -> Callable[..., Any]:
        def exec_schedule(pipe_schedule: Any) -> Any:
            if not torch.is_grad_enabled():  # evaluation
                return plain(pipe_schedule)
            try:
                found = plain(_Announced(pipe_schedule, announce, stages))
            finally:
                current[0] = Turn()
            after_batch()
            return found

        return exec_schedule

    patches.replace(engine, _compat.INSTRUCTION_MAP, table)
    patches.replace(engine, _compat.EXEC_SCHEDULE, announced)
