"""The order of a step, learned from the step before, and what the runtime is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ssdtrain_megatron.schedule import Schedule, ScheduledEvent

Key = tuple[int, int]


class Recorder:
    """A runtime that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    @contextmanager
    def forward(self, chunk: int, microbatch: int, *, keep: bool) -> Iterator[None]:
        self.told.append(("forward", (chunk, microbatch), keep))
        yield

    @contextmanager
    def backward(self, chunk: int, microbatch: int) -> Iterator[None]:
        self.told.append(("backward", (chunk, microbatch)))
        yield

    def next_backward(self, *keys: Key) -> None:
        self.told.append(("next", keys))

    def step_begin(self) -> None:
        self.told.append(("begin",))

    def step_end(self) -> None:
        self.told.append(("end",))


def one_f_one_b(stages: int, stage: int, microbatches: int) -> list[ScheduledEvent]:
    """Megatron's schedule without interleaving: warm-up, steady, cool-down."""
    warmup = min(stages - stage - 1, microbatches)
    events = [ScheduledEvent(False, 0, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        events += [ScheduledEvent(False, 0, m + warmup), ScheduledEvent(True, 0, m)]
    return events + [ScheduledEvent(True, 0, m) for m in range(microbatches - warmup, microbatches)]


class Rank:
    """A schedule whose events are played, with the outputs that Megatron would hand around."""

    def __init__(self, chunks: int = 1) -> None:
        self.recorder = Recorder()
        self.schedule = Schedule(self.recorder, chunks)  # type: ignore[arg-type]
        self.outputs: dict[Key, torch.Tensor] = {}

    def play(self, events: list[ScheduledEvent], microbatches: int) -> list[tuple[Any, ...]]:
        """What the runtime was told during these events."""
        self.recorder.told = []
        for event in events:
            if event.backward:
                output = self.outputs.pop(event.key)
                assert self.schedule.knows(output)
                self.schedule.backward(output, lambda: None)
                assert not self.schedule.knows(output)
            else:
                self.outputs[event.key] = output = torch.zeros(1)
                self.schedule.forward(*event.key, microbatches, lambda: None)
                self.schedule.record_output(output, *event.key)
        return self.recorder.told


def hints(told: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [entry for entry in told if entry[0] == "next"]


def test_the_first_step_has_no_hints_and_every_step_begins_and_ends() -> None:
    rank = Rank()
    events = one_f_one_b(4, 1, 6)
    for step in range(3):
        told = rank.play(events, 6)
        assert told[0] == ("begin",) and told[-1] == ("end",)
        assert [entry[0] for entry in told].count("begin") == 1
        named = [keys for _, keys in hints(told) if keys]
        assert bool(named) == (step > 0)


def test_warm_up_steady_and_cool_down_name_the_backwards_that_come_next() -> None:
    rank = Rank()
    events = one_f_one_b(3, 0, 4)  # F0 F1 | F2 B0 F3 B1 | B2 B3
    rank.play(events, 4)
    told = [entry for entry in rank.play(events, 4) if entry[0] in ("forward", "backward", "next")]
    assert told == [
        ("forward", (0, 0), False),
        ("forward", (0, 1), False),
        # The backward after F2 is that of microbatch 0: its loads start with the forward.
        ("next", ((0, 0), (0, 1))),
        ("forward", (0, 2), False),
        ("backward", (0, 0)),
        ("next", ((0, 1), (0, 2))),
        ("next", ((0, 1), (0, 2))),
        ("forward", (0, 3), False),
        ("backward", (0, 1)),
        ("next", ((0, 2), (0, 3))),
        ("backward", (0, 2)),
        ("next", ((0, 3),)),
        ("backward", (0, 3)),
        ("next", ()),
        ("next", ()),
    ]


def test_without_a_pipeline_and_on_the_last_stage_nothing_is_kept() -> None:
    for stages in (1, 4):
        rank = Rank()
        events = one_f_one_b(stages, stages - 1, 3)
        rank.play(events, 3)
        told = rank.play(events, 3)
        assert [keep for entry, *rest in told if entry == "forward" for keep in rest[1:]] == [False] * 3
        assert hints(told) and all(keys == () for _, keys in hints(told))


def test_a_tape_whose_backward_follows_at_once_is_kept_beside_others() -> None:
    rank = Rank(chunks=2)
    order = "F00 F01 F10 B10 F11 B11 B00 B01"
    events = [ScheduledEvent(text[0] == "B", int(text[1]), int(text[2])) for text in order.split()]
    rank.play(events, 2)
    told = rank.play(events, 2)
    kept = {entry[1] for entry in told if entry[0] == "forward" and entry[2]}
    assert kept == {(1, 0), (1, 1)}


def test_the_order_in_which_chunks_are_given_changes_nothing() -> None:
    """Given in the reverse order, the step begins on chunk 1."""
    order = "F00 F01 F10 B10 F11 B11 B00 B01"
    events = [ScheduledEvent(text[0] == "B", int(text[1]), int(text[2])) for text in order.split()]
    swapped = [ScheduledEvent(backward, 1 - chunk, microbatch) for backward, chunk, microbatch in events]
    one, other = Rank(chunks=2), Rank(chunks=2)

    def renamed(entry: Any) -> Any:
        """An entry of what was told, with the chunks' numbers swapped."""
        if isinstance(entry, tuple) and len(entry) == 2 and all(type(part) is int for part in entry):
            return 1 - entry[0], entry[1]
        return tuple(map(renamed, entry)) if isinstance(entry, tuple) else entry

    for _ in range(3):
        told = one.play(events, 2)
        assert other.play(swapped, 2) == list(map(renamed, told))
    assert [entry for entry in told if entry[0] in ("begin", "end")] == [("begin",), ("end",)]


def test_another_number_of_microbatches_is_another_order() -> None:
    rank = Rank()
    rank.play(one_f_one_b(3, 0, 4), 4)
    assert not [keys for _, keys in hints(rank.play(one_f_one_b(3, 0, 6), 6)) if keys]
    assert [keys for _, keys in hints(rank.play(one_f_one_b(3, 0, 4), 4)) if keys]
    assert [keys for _, keys in hints(rank.play(one_f_one_b(3, 0, 6), 6)) if keys]


def test_an_unexpected_event_ends_the_hints_of_its_step_only() -> None:
    rank = Rank()
    events = one_f_one_b(3, 0, 4)
    rank.play(events, 4)
    other = [*events[:3], events[4], *events[3:4], *events[5:]]  # F3 before B0
    told = rank.play(other, 4)
    after = told.index(("forward", (0, 3), False))
    assert not [keys for _, keys in hints(told[after:]) if keys]
    # That order was a whole step, and so it is the one expected now.
    assert [keys for _, keys in hints(rank.play(other, 4)) if keys]


def test_a_step_that_broke_off_leaves_nothing_to_the_next() -> None:
    rank = Rank()
    events = one_f_one_b(3, 0, 4)
    whole = rank.play(events, 4)
    rank.play(events[:5], 4)
    left = list(rank.outputs.values())
    rank.outputs.clear()
    told = rank.play(events, 4)
    assert left and not any(rank.schedule.knows(output) for output in left)
    assert told[0] == ("next", ())  # and it is not counted
    assert told[1:] == rank.play(events, 4)
    assert told[1:] != whole


def test_an_evaluation_with_gradients_on_is_no_step() -> None:
    rank = Rank()
    events = one_f_one_b(3, 1, 4)
    rank.play(events, 4)
    forwards = [event for event in events if not event.backward]
    told = rank.play(forwards, 4) + rank.play(forwards, 4) + rank.play(events, 4)
    assert [entry[0] for entry in told].count("end") == 1 and told[-1] == ("end",)


def test_an_output_of_somebody_else_is_not_known() -> None:
    rank = Rank()
    rank.play(one_f_one_b(2, 0, 1)[:1], 1)
    assert not rank.schedule.knows(torch.zeros(1))
    assert not rank.schedule.knows(None)
