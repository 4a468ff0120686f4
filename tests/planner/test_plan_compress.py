"""Compressed inputs as an action of a plan: chosen only where the config allows it, and carried out in the chosen blocks only."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import ssdtrain
from ssdtrain.compact.linear import CompactForward
from ssdtrain.config import ConfigError, load_config
from ssdtrain.planner.blocks import RECORDED, WARM_UP
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.explain import plan_table
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import KEPT, Block, Machine, one_after_the_other
from ssdtrain.planner.plans import Limits, NoPlan, SearchProblem, actions_for
from ssdtrain.planner.search import search
from tests.planner.test_plan_auto import LAYERS, QUIET, auto_of, equal, gpt, train

STEPS = WARM_UP + RECORDED + 1 + RECORDED + 2
COMPACT = {"mode": "quant", "codec": "int8"}


def config(limit: int) -> dict[str, Any]:
    plan = {"device_limit": limit, "recompute": "off", "compress": True}
    return {"plan": plan, "compact": COMPACT, **QUIET}


def compressing(model: nn.Module) -> list[str]:
    """Names of the layers that compress in the next forward."""
    forwards = ((name, module.__dict__.get("forward")) for name, module in model.named_modules())
    return [name for name, forward in forwards if isinstance(forward, CompactForward) and forward.active]


def test_what_the_config_does_not_allow_is_an_error_at_start() -> None:
    for sections in ({}, {"compact": {"mode": "lowrank"}}):
        with pytest.raises(ConfigError) as raised:
            load_config({"plan": {"compress": True}, **sections})
        assert [problem.path for problem in raised.value.problems] == ["ssdtrain.plan.compress"]
    with pytest.raises(ConfigError, match="can compress no block here") as raised:
        ssdtrain.attach(nn.Linear(4, 4), config(1 << 20))
    assert raised.value.problems[0].path == "ssdtrain.plan.compress"


def test_blocks_are_compressed_only_where_a_block_saves_less_by_it() -> None:
    given = {"forward": 1.0, "backward": 2.0, "saved": 100}
    smaller = Block("", forward=1.2, backward=2.2, saved=40)
    blocks = [
        Block("a", **given),
        Block("b", **given, compressed=smaller),
        Block("c", **given, compressed=smaller),
    ]
    problem = SearchProblem(
        [blocks], one_after_the_other(), Machine(), actions_for(Machine(), recompute=False, compress=True)
    )
    [found, *_] = search(problem, Limits(240))
    assert sorted(found.actions) == ["compress", "keep", "keep"] and found.actions[0] == "keep"
    assert (found.peak, found.seconds) == (240, pytest.approx(9.4))
    with pytest.raises(NoPlan) as raised:
        search(problem, Limits(179))
    assert raised.value.smallest.peak == 180
    kept = simulate([blocks], [[KEPT] * 3], problem.order, Machine())
    table = plan_table("plan auto", problem, [found], kept, limit=240)
    assert "compress, 100 B to 40 B (lossy), costs 400 ms" in table


def test_what_is_lossy_is_not_chosen_where_it_brings_nothing() -> None:
    block = Block("a", forward=1.0, backward=2.0, saved=100)
    blocks = [replace(block, compressed=replace(block, saved=40))] * 3
    problem = SearchProblem(
        [blocks], one_after_the_other(), Machine(), actions_for(Machine(), recompute=False, compress=True)
    )
    [found, *_] = search(problem, Limits(300))
    assert found.actions == ("keep",) * 3
    assert "compress" not in actions_for(Machine())


def followed(limit: int) -> PlanController:
    """The plan at this limit, after a step in which exactly its blocks compressed."""
    model = gpt()
    with ssdtrain.attach(model, config(limit)) as runtime:
        train(model, STEPS, microbatches=1)
        auto = auto_of(runtime)
        pairs = zip(auto.problem.blocks, auto.plan.actions, strict=True)
        chosen = {block.name for block, action in pairs if action == "compress"}
        assert {".".join(name.split(".")[:2]) for name in compressing(model)} == chosen
        assert auto.metric.compressed_blocks == len(chosen)
        before = runtime.compact.compression.counted.input_bytes
        runtime.reset_peak()
        train(model, 1, microbatches=1)
        assert (runtime.compact.compression.counted.input_bytes > before) == bool(chosen)
        statistics = runtime.statistics()
        assert statistics.offload.activation_peak_bytes == pytest.approx(auto.plan.peak, rel=0.01)
    assert compressing(model) == []
    return auto


def test_a_limit_that_only_compression_meets(caplog: pytest.LogCaptureFixture) -> None:
    roomy = followed(1 << 30)
    assert roomy.plan.actions == ("keep",) * len(roomy.plan.actions)
    kept = roomy.plan.peak
    least = kept - sum(
        block.saved + block.small - block.compressed.saved - block.compressed.small
        for block in roomy.problem.blocks
        if block.compressed is not None
    )
    assert least < 0.9 * kept
    with caplog.at_level(logging.INFO):
        tight = followed((kept + least) // 2)
    assert 0 < tight.plan.count("compress") < LAYERS
    assert tight.plan.peak <= (kept + least) // 2


def test_where_nothing_is_compressed_gradients_are_to_the_bit() -> None:
    plain, model = gpt(), gpt()
    with ssdtrain.attach(model, config(1 << 30)) as runtime:
        train(model, STEPS)
        assert auto_of(runtime).plan is not None
        model.load_state_dict(plain.state_dict())
        assert equal(train(model, 2), train(plain, 2))
