"""Saved tensors that stay encoded as an action of a plan: chosen by the cost model, and no bit changes with `exact`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain.planner.blocks import RECORDED, WARM_UP
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.explain import plan_table
from ssdtrain.planner.measured_blocks import with_encoded
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import KEPT, Block, Machine, Tier, one_after_the_other
from ssdtrain.planner.plans import Limits, Objective, SearchProblem, actions_for
from ssdtrain.planner.search import search
from tests.planner.test_plan_auto import LAYERS, QUIET, auto_of, equal, gpt, train

STEPS = WARM_UP + RECORDED + 3
BLOCK = Block("", forward=1.0, backward=2.0, saved=1000, small=10, recompute=0.9, inputs=100)


def config(limit: int, codec: str = "exact", recompute: str = "off") -> dict[str, Any]:
    plan = {"device_limit": limit, "recompute": recompute, "encode": codec}
    return {"plan": plan, **QUIET}


def best(blocks: list[Block], limit: int, machine: Machine | None = None, *, recompute: bool = True) -> Any:
    machine = Machine() if machine is None else machine
    actions = actions_for(machine, recompute=recompute, encode=True)
    return search(SearchProblem([blocks], one_after_the_other(), machine, actions), Limits(limit))[0]


def test_a_model_without_blocks_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match="can encode no block here") as raised:
        ssdtrain.attach(nn.Linear(4, 4), config(1 << 20))
    assert raised.value.problems[0].path == "ssdtrain.plan.encode"


def test_a_block_is_encoded_where_that_is_the_cheapest_way_to_fit() -> None:
    blocks = [with_encoded(replace(BLOCK, name=name), 0.75, 1e-4, 2e-4) for name in "abcd"]
    kept = simulate([blocks], [[KEPT] * 4], one_after_the_other(), Machine())
    plan = best(blocks, kept.peak_bytes - 100)
    assert plan.count("encode") == 1 and plan.count("recompute") == 0
    assert plan.seconds == pytest.approx(kept.seconds + 0.3)
    # What encoding cannot free is recomputed, and a codec that takes longer than that is not used.
    assert best(blocks, kept.peak_bytes // 2).count("recompute") > 0
    slow = [with_encoded(replace(BLOCK, name=name), 0.75, 1e-3, 2e-3) for name in "abcd"]
    assert best(slow, kept.peak_bytes - 100).count("encode") == 0
    # Nor where a drive takes it for nothing.
    drive = Machine((Tier("ssd", 1e5, 1e5),), prefetch=1000)
    assert best(blocks, kept.peak_bytes - 100, drive).count("encode") == 0
    text = plan_table(
        "plan auto", SearchProblem([blocks], [], Machine(), actions_for(Machine(), encode=True)), [plan], kept
    )
    assert "encode, 1010 B to 760 B, costs 300 ms" in text


def test_without_the_codec_no_plan_is_better() -> None:
    blocks = [with_encoded(replace(BLOCK, name=name), 0.75, 1e-4, 2e-4) for name in "abcdef"]
    for tiers in ((), (Tier("ssd", 500.0, 500.0),)):
        machine = Machine(tiers)
        for limit in (6100, 5800, 5000, 4200):
            problem = SearchProblem([blocks], one_after_the_other(), machine, actions_for(machine))
            without = search(problem, Limits(limit), Objective())[0]
            assert best(blocks, limit, machine).seconds <= without.seconds * (1 + 1e-9)


def test_what_saves_nothing_is_not_encoded() -> None:
    block = with_encoded(BLOCK, 0.99, 0.0, 0.0)
    assert block.encoded is None and best([block] * 3, 2900, recompute=True).count("encode") == 0


def followed(limit: int, **options: str) -> tuple[PlanController, list[Any], Any]:
    """The plan at this limit, losses and weights, and the metrics of a step under it."""
    model = gpt()
    with ssdtrain.attach(model, config(limit, **options)) as runtime:
        found = train(model, STEPS, microbatches=1)
        runtime.reset_peak()
        before = runtime.statistics()
        found += train(model, 1, microbatches=1)
        after = runtime.statistics()
        encoded = after.offload.kept_encoded_bytes - before.offload.kept_encoded_bytes
        return auto_of(runtime), found, (after, encoded)


def plainly() -> list[Any]:
    model = gpt()
    return train(model, STEPS, microbatches=1) + train(model, 1, microbatches=1)


def test_a_limit_that_encoding_meets_and_no_bit_changes() -> None:
    roomy, _, (_, encoded) = followed(1 << 30)
    assert set(roomy.plan.actions) == {"keep"} and encoded == 0
    limit = round(0.95 * roomy.plan.peak)
    tight, found, (metrics, encoded) = followed(limit)
    assert 0 < tight.plan.count("encode") <= LAYERS
    assert tight.metric.encoded_blocks == tight.plan.count("encode") and encoded > 0
    assert tight.plan.peak <= limit
    peak = metrics.offload.activation_peak_bytes
    assert peak <= limit and peak == pytest.approx(tight.plan.peak, rel=0.04)
    assert metrics.store.bytes_written == 0
    assert equal(found, plainly())


def test_blocks_that_were_recomputed_while_they_were_measured_may_be_encoded() -> None:
    roomy, *_ = followed(1 << 30, recompute="auto")
    assert roomy.plan is not None and roomy.problem is not None
    blocks = [block for block in roomy.problem.blocks if block.name.startswith("blocks.")]
    assert len(blocks) == LAYERS and all(block.encoded is not None for block in blocks)
