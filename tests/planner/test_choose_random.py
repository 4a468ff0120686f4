"""The choice of blocks on machines drawn at random, against every choice there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest

from ssdtrain.planner import search
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import (
    KEPT,
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
from ssdtrain.planner.plans import HIDDEN
from tests.planner.offloads import choose_offloads

SSD = Choice("ssd")


def drawn(seed: int) -> tuple[list[list[Block]], Sequence[Pass], Machine, random.Random]:
    """A model of 2 to 6 blocks, on a CPU or a device."""
    draw = random.Random(seed)
    cpu, count = draw.random() < 0.4, draw.randint(2, 6)
    blocks = []
    for number in range(count):
        forward = draw.uniform(0.2, 2)
        costs = {"storing": draw.choice([0, 0.001, 0.05]), "loading": draw.choice([0, 0.001, 0.05])}
        blocks.append(
            Block(
                f"{number}",
                forward,
                draw.uniform(0.5, 2.5) * forward,
                draw.choice([0, 20, 50, 100, 300]),
                fixed=draw.choice([0, 0, 10, 50]),
                small=draw.choice([0, 0, 5]),
                forward_transient=draw.choice([0, 0, 60]),
                backward_transient=draw.choice([0, 0, 60]),
                continues=draw.random() < 0.15 and number + 1 < count,
                **costs if cpu else {},
            )
        )
    write = draw.choice([20.0, 40.0, 80.0, 150.0, 300.0, 1e12])
    tier = Tier("ssd", write, write * draw.choice([0.5, 1, 2]), draw.random() < 0.3, depth=1 << 30)
    machine = Machine(
        (tier,),
        None if cpu else Link(500, 500),
        in_flight=draw.choice([150, 400, 1 << 60]),
        prefetch=draw.choice([1, 100, 400]),
        window=draw.choice([100, 300]),
        buffers=draw.choice([0, 150]) if cpu else 0,
        buffers_stay=draw.random() < 0.5,
        together=draw.choice([0, 120]) if cpu else 0,
        in_order=cpu and draw.random() < 0.5,
        hook=None if cpu else draw.choice([None, 0.1, 1.0]),
        copies=draw.choice([None, 2000.0]),
    )
    order = draw.choice(
        [one_after_the_other(), one_after_the_other(2), one_forward_one_backward(3, 2)],
    )
    return [blocks], order, machine, draw


def every_step(chunks: list[list[Block]], order: Sequence[Pass], machine: Machine) -> list[StepTimeline]:
    """Of each choice of whole blocks; the first one keeps everything."""
    [blocks] = chunks
    found = []
    for leaves in product((False, True), repeat=len(blocks)):
        choices = [SSD if one and block.saved else KEPT for one, block in zip(leaves, blocks, strict=True)]
        found.append(simulate(chunks, [choices], order, machine, steps=2))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_of_few_blocks_no_choice_is_better_by_a_twentieth_with_a_budget_and_without(seed: int) -> None:
    chunks, order, machine, draw = drawn(seed)
    kept, *others = every_step(chunks, order, machine)
    limit = kept.seconds * (1 + HIDDEN)
    allowed = [
        step for step in (kept, *others) if step.written["ssd"] <= machine.tiers[0].write * kept.seconds
    ]
    chosen = choose_offloads(chunks, order, machine)
    assert chosen.predicted == simulate(chunks, chosen.choices, order, machine, steps=2)
    assert chosen.predicted.seconds <= limit and chosen.predicted.peak_bytes <= kept.peak_bytes
    lowest = min(step.peak_bytes for step in allowed if step.seconds <= limit)
    assert chosen.predicted.peak_bytes <= 1.05 * lowest

    budget = draw.randint(min(step.peak_bytes for step in allowed), kept.peak_bytes)
    within = choose_offloads(chunks, order, machine, device_budget=budget).predicted
    assert within.peak_bytes <= budget
    assert within.seconds <= 1.05 * min(step.seconds for step in allowed if step.peak_bytes <= budget)


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_in_one_pass_promises_no_more_than_it_keeps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for many blocks: the lowest peak is not always found, but time and peak are as said."""
    monkeypatch.setattr(search, "EXACT", 0)
    chunks, order, machine, draw = drawn(seed)
    kept, *others = every_step(chunks, order, machine)
    lowest = min(step.peak_bytes for step in (kept, *others))
    for budget in (None, draw.randint(lowest, kept.peak_bytes)):
        chosen = choose_offloads(chunks, order, machine, device_budget=budget)
        assert chosen.predicted == simulate(chunks, chosen.choices, order, machine, steps=2)
        assert chosen.predicted.peak_bytes <= kept.peak_bytes
        if budget is None:
            assert chosen.predicted.seconds <= kept.seconds * (1 + HIDDEN)
