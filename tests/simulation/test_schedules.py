"""Orders of pipeline schedules on the simulated device: where bandwidth suffices, no load comes late."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.simulated_device import GB, Load, gpt, measure
from tests.support.simulated.training import keep_peak

MiB = 1 << 20
STAGES = 4

Order = list[tuple[str, int]]
"""Forwards and backwards of one rank, by the number of the tape."""


def one_forward_one_backward(stage: int, microbatches: int) -> Order:
    """1F1B (arXiv 2006.09503): stage s has S - s microbatches alive."""
    return _paired(STAGES - stage - 1, range(microbatches), range(microbatches))


def interleaved(stage: int, microbatches: int, chunks: int = 2) -> Order:
    """Interleaved 1F1B (arXiv 2104.04473): groups of S microbatches pass the first chunk, then the next one; backwards begin with
    the last chunk."""
    numbers = range(microbatches * chunks)

    def tape(number: int, *, backward: bool) -> int:
        group, inside = divmod(number, STAGES * chunks)
        chunk = inside // STAGES
        chunk = chunks - 1 - chunk if backward else chunk
        return (group * STAGES + inside % STAGES) * chunks + chunk

    return _paired(
        2 * (STAGES - stage - 1) + (chunks - 1) * STAGES,
        [tape(number, backward=False) for number in numbers],
        [tape(number, backward=True) for number in numbers],
    )


def _paired(warm_up: int, forwards: range | list[int], backwards: range | list[int]) -> Order:
    order = [("forward", tape) for tape in forwards[:warm_up]]
    for forward, backward in itertools.zip_longest(forwards[warm_up:], backwards):
        order += [("forward", forward)] if forward is not None else []
        order.append(("backward", backward))
    return order


def dualpipe(stage: int, microbatches: int) -> Order:
    """DualPipe (arXiv 2412.19437, figure 5): half of the microbatches come from each end of the pipeline, and this rank has
    a stage of each direction, 0 and 1. A forward and the backward that it overlaps with run one after the other here."""
    each, half = microbatches // 2, STAGES // 2
    outer = half - stage - 1  # stages of a direction between this one and the middle
    runs = [
        *["F0"] * 2 * outer,
        *["F0", "F1"] * (stage + 1),
        *["B1", "F1"] * outer,
        *["F0", "B1", "F1", "B0"] * (each - STAGES + stage + 1),
        *["B1", "F1", "B0"] * outer,
        *["B1", "B0"] * (stage + 1),
        *["B0"] * outer,
    ]
    tapes: dict[str, Iterator[int]] = {
        run: itertools.count(int(run[1]) * each) for run in ("F0", "F1", "B0", "B1")
    }
    return [("forward" if run[0] == "F" else "backward", next(tapes[run])) for run in runs]


@dataclass(frozen=True)
class Scheduled(Load):
    """A load in the order of a schedule."""

    passes: tuple[tuple[str, int], ...] = ()

    @property
    def order(self) -> Order:
        return list(self.passes)

    @property
    def kept(self) -> int:
        changes = (1 if phase == "forward" else -1 for phase, _ in self.passes)
        return max(itertools.accumulate(changes)) * keep_peak(self.layers)


CASES = {
    f"{make.__name__}, stage {stage}": make(stage, 8)
    for make, stages in ((one_forward_one_backward, (0, 1, 2)), (interleaved, (0, 1, 3)), (dualpipe, (0, 1)))
    for stage in stages
}


@pytest.mark.parametrize("name", CASES)
def test_an_order_has_each_forward_before_its_backward_and_both_once(name: str) -> None:
    order = CASES[name]
    forwards = [tape for phase, tape in order if phase == "forward"]
    backwards = [tape for phase, tape in order if phase == "backward"]
    assert sorted(forwards) == sorted(backwards) == list(range(len(forwards)))
    assert all(order.index(("forward", tape)) < order.index(("backward", tape)) for tape in forwards)


def measured(order: Order, drive: float = 15) -> dict[str, Any]:
    load = Scheduled(
        gpt(4, MiB, MiB / (8 * GB)),
        25 * GB,
        drive * GB,
        8 * MiB,
        2 * MiB,
        microbatches=len(order) // 2,
        passes=tuple(order),
    )
    return measure(load)


@pytest.mark.parametrize("name", CASES)
def test_no_load_is_late(name: str) -> None:
    found = measured(CASES[name])
    assert found["sufficient"] and found["bits_equal"]
    assert found["total_over_ideal"] <= 1 + 1e-9  # the device waited for nothing
    assert found["host_syncs"] == 0 and found["outside_bytes"] == 0
    assert found["offloaded_share"] >= 0.4  # less where a backward follows its forward at once
    assert found["peak_over_keep"] <= 0.25


def test_with_a_drive_that_is_too_slow_they_are() -> None:
    found = measured(one_forward_one_backward(0, 8), drive=4)
    assert not found["sufficient"] and found["bits_equal"]
    assert found["total_over_ideal"] > 1.05
