"""Where a plan may recompute blocks of an engine, and where it may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
import ssdtrain_ds.checkpointing
from ssdtrain.config import ConfigError, load_config
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.measured_blocks import kind_of
from ssdtrain_ds import _compat
from ssdtrain_ds.plan import plan_blocks
from tests.deepspeed.conftest import MakeEngine, train

pytestmark = pytest.mark.slow

PLAN: dict[str, Any] = {"plan": "auto", "report": {"interval": 0}}


def test_blocks_are_planned_for_without_tiers_and_put_back(make_engine: MakeEngine) -> None:
    engine = make_engine(PLAN)
    runtime = ssdtrain_ds.runtime_of(engine)
    (plan,) = (feature for feature in runtime.features if isinstance(feature, PlanController))
    assert plan.description() == "plan: auto, 3 blocks"
    assert (
        "forward" in engine.module.blocks[0].__dict__
    )  # all but the last are recomputed while they are profiled
    with pytest.raises(ConfigError, match=r"ssdtrain\.plan.*engine\.compile.*\"recompute\": \"off\""):
        engine.compile()
    runtime.close()
    assert not any("forward" in block.__dict__ for block in engine.module.blocks)
    assert "compile" not in engine.__dict__


def test_compiling_divided_layers_is_an_error_and_not_a_trace_without_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compat, "tensor_parallel_layers", lambda model: ["blocks.0.q_proj"])
    engine = make_engine()
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload.*engine\.compile.*AutoTP divides"):
        engine.compile()


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ("checkpointing_is_configured", "activation checkpointing is configured"),
        ("has_experts", "has DeepSpeed's experts"),
        ("is_plain_engine", "runs its model in its own way"),
        ("has_random_ltd", "random layer token drop"),
        ("communicates_past_torch", "a backend other than torch.distributed"),
    ],
)
def test_where_blocks_must_not_run_again_the_error_says_why(
    found: str, why: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compat, found, lambda *_: found != "is_plain_engine")
    with pytest.raises(ConfigError, match=f"can recompute no block here: .*{why}.*there is no tier"):
        make_engine(PLAN)


def test_blocks_stay_encoded_and_no_bit_changes(make_engine: MakeEngine) -> None:
    """As little memory as there is, in twice the time, where nothing may run again."""
    expected = train(make_engine(None), 9)
    plan = {"recompute": "off", "encode": "exact", "max_slowdown": 1.0}
    engine = make_engine({"plan": plan, "report": {"interval": 0}})
    losses = train(engine, 9)
    statistics = ssdtrain_ds.runtime_of(engine).statistics()
    assert statistics.offload.kept_encoded_bytes > 0 and statistics.store.bytes_written == 0
    assert all(map(torch.equal, losses, expected))


def test_what_is_lossy_is_not_chosen(make_engine: MakeEngine) -> None:
    block = {"plan": {"compress": True}, "compact": {"mode": "quant", "codec": "int8"}}
    with pytest.raises(ConfigError, match=r"plan\.compress.*can compress no block here"):
        make_engine(block)


def test_a_backend_of_another_kind_is_not_torchs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(None)
    assert not _compat.communicates_past_torch(engine)
    monkeypatch.setattr(_compat.communication, "cdb", object())
    assert _compat.communicates_past_torch(engine)


def test_engines_that_exist_restore_random_states_after_uninstall(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ssdtrain_ds.checkpointing.RANDOM_STATE
    registered = {name: ssdtrain.checkpoint._random[name]}
    monkeypatch.setattr(ssdtrain.checkpoint, "_random", registered)
    make_engine(PLAN)
    ssdtrain_ds.uninstall()
    assert name not in registered
    read = [state.read for state in registered.values()]
    ssdtrain_ds.install()
    tracker = _compat.rng_tracker()
    tracker.states_["probe"] = torch.zeros(1)
    try:
        found = [each() for each in read]
        assert any(isinstance(one, dict) and "probe" in one for one in found)
    finally:
        del tracker.states_["probe"]


def test_partitioned_blocks_of_two_sizes_are_two_kinds(make_engine: MakeEngine) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(8, width) for width in (8, 8, 16))
    engine = make_engine(PLAN, model=model, zero_optimization={"stage": 3})
    first, second, third = map(kind_of, engine.module.blocks)
    assert first == second != third


def test_recomputations_leave_no_modules_in_the_list_of_running_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(PLAN, zero_optimization={"stage": 3})
    running = _compat.running_modules(engine)
    assert running is not None
    before = list(running)
    train(engine, 1)  # all blocks but one are recomputed while they are profiled
    assert running == before


def test_a_pipeline_stage_of_functions_has_nothing_to_plan_for(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(None)
    monkeypatch.setattr(_compat, "is_pipeline", lambda _: True)
    for stages in (1, 2):
        monkeypatch.setattr(_compat, "stages_of", lambda _, stages=stages: stages)
        found = plan_blocks(engine, load_config({"plan": "auto"}), {})
        assert not found.blocks and found.empty_stage == (stages == 2)
    named = plan_blocks(engine, load_config({"plan": {"blocks": ["elsewhere.*"]}}), {})
    assert named.empty_stage


def test_a_pipeline_that_recomputes_by_its_config_is_not_recomputed_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(None)
    monkeypatch.setattr(_compat, "is_pipeline", lambda _: True)
    written = {"pipeline": {"activation_checkpoint_interval": 1}}
    found = plan_blocks(engine, load_config({"plan": {"blocks": ["blocks.*"]}}), written)
    assert not found.blocks and "activation_checkpoint_interval" in found.why
